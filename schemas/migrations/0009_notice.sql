-- A delivery may answer a message of a channel: it was accepted, waits, was refused. Such a notice has a run only when there is one.
alter table delivery alter column run_id drop not null;
alter table delivery add column inbound_id uuid;
alter table delivery drop constraint delivery_about_known, add constraint delivery_about_known
    check (about in ('run_ended', 'sandbox_unknown', 'accepted', 'waits', 'refused', 'status', 'unread', 'channel_notice'));
alter table delivery add constraint delivery_of_something check (run_id is not null or inbound_id is not null);
create unique index delivery_notice_once on delivery (inbound_id, about) where inbound_id is not null;
-- Answers that were given up and whose channel's owner does not know yet.
alter table delivery add column told_at timestamptz;
create index delivery_untold on delivery (ended_at) where state = 'dead' and kind = 'thread' and told_at is null;

-- A message that asked something and was answered (`status`) neither starts nor steers a run.
alter table inbound drop constraint inbound_state_known, add constraint inbound_state_known
    check (state in ('received', 'waiting', 'started', 'steered', 'answered', 'ignored', 'refused', 'dead'));
-- How often it was a steer that the run did not take, and since when the present one is not known to be taken or not.
alter table inbound add column steers int not null default 0;
alter table inbound add column steer_looked_at timestamptz;
create index inbound_steer_open on inbound (steer_looked_at) where steer_looked_at is not null;
create index inbound_of_channel on inbound (channel_id, handled_at) where state in ('started', 'steered');

-- What comes in for a paused channel is kept and waits.
alter table channel add column paused_at timestamptz;
