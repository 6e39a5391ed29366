-- What was sent of a delivery, part by part, and what the receiver calls each. A row is there before its part is sent.
create table delivery_part (
    delivery_id uuid not null references delivery on delete cascade,
    n           int not null,
    tenant_id   uuid not null,
    sending_at  timestamptz not null default now(),
    -- null while nobody knows whether it was sent
    sent_at     timestamptz,
    -- what the receiver calls it, or is going to
    receiver_id text,
    primary key (delivery_id, n),
    constraint delivery_part_sent_is_named check (sent_at is null or receiver_id is not null)
);

-- The provider, or our account with it, is out of order: nobody asks it before `probe_at`, and then one asks.
alter table channel add column broken_at timestamptz;
alter table channel add column broken_why text;
alter table channel add column probe_at timestamptz;
alter table channel add constraint channel_broken_is_told check ((broken_at is null) = (broken_why is null) and (broken_at is null) = (probe_at is null));
create index channel_broken on channel (broken_at) where broken_at is not null;

-- Its owner is told of a channel by which nothing goes out until somebody does something.
alter table delivery drop constraint delivery_about_known, add constraint delivery_about_known
    check (about in ('run_ended', 'sandbox_unknown', 'accepted', 'waits', 'refused', 'status', 'unread', 'channel_notice', 'channel_broken'));
