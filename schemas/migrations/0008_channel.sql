-- Results and notices may go to a thread of a channel; `url` is then the thread's id.
alter table run_target drop constraint run_target_kind_known, add constraint run_target_kind_known check (kind in ('webhook', 'thread'));
alter table delivery drop constraint delivery_kind_known, add constraint delivery_kind_known check (kind in ('webhook', 'thread'));

-- channel -----------------------------------------------------------------------------------------------------------------------------
create table channel (
    id           uuid primary key,
    tenant_id    uuid not null references tenant,
    name         text not null,
    definition   jsonb not null,
    -- a JSON object of its secrets, sealed (chassis::secret)
    secrets      bytea,
    -- who acts for authors that are nobody else
    principal_id uuid not null references principal,
    deleted_at   timestamptz,
    created_at   timestamptz not null default now(),
    changed_at   timestamptz not null default now()
);
create unique index channel_name_key on channel (tenant_id, name) where deleted_at is null;

-- Which channel takes mail for an address: one for each, over all tenants.
create table channel_address (
    address    text primary key,
    channel_id uuid not null references channel,
    tenant_id  uuid not null
);
create index channel_address_of on channel_address (channel_id);

-- A conversation in a channel and the session that is bound to it; the session has the same uuid.
create table thread (
    id         uuid primary key,
    tenant_id  uuid not null,
    channel_id uuid not null references channel,
    agent_name text not null,
    created_at timestamptz not null default now()
);

-- Messages of a thread by the provider's own ids, others' and ours: an answer to any of them belongs to the thread.
create table thread_message (
    channel_id uuid not null references channel,
    message_id text not null,
    thread_id  uuid not null references thread,
    tenant_id  uuid not null,
    created_at timestamptz not null default now(),
    primary key (channel_id, message_id)
);
create index thread_message_of on thread_message (thread_id);

-- What came in, as it came. What it becomes has the same uuid: the run that it starts, the steer, the thread that it opens.
create table inbound (
    id              uuid primary key,
    tenant_id       uuid not null,
    channel_id      uuid not null references channel,
    -- the provider's delivery, and the message that it brings: each is taken once
    delivery_key    text not null,
    message_key     text not null,
    envelope        jsonb not null,
    raw             bytea,
    -- what an answer needs of it, once it was read
    head            jsonb,
    state           text not null constraint inbound_state_known check (state in ('received', 'waiting', 'started', 'steered', 'ignored', 'refused', 'dead')),
    reason          text,
    author          text,
    thread_id       uuid references thread,
    run_id          uuid,
    attempts        int not null default 0,
    -- fences a worker that slept through its claim
    claim           bigint not null default 0,
    next_attempt_at timestamptz,
    traceparent     text,
    created_at      timestamptz not null default now(),
    handled_at      timestamptz,
    constraint inbound_delivery_once unique (channel_id, delivery_key),
    constraint inbound_message_once unique (channel_id, message_key),
    constraint inbound_open_has_due check ((state in ('received', 'waiting')) = (next_attempt_at is not null)),
    constraint inbound_open_has_raw check (state not in ('received', 'waiting') or raw is not null)
);
create index inbound_due on inbound (next_attempt_at) where next_attempt_at is not null;
create index inbound_list on inbound (tenant_id, created_at desc, id desc);
create index inbound_of_thread on inbound (thread_id, created_at, id);
create index inbound_old on inbound (created_at) where raw is not null;

-- Attachments that were kept as files.
create table inbound_file (
    inbound_id uuid not null references inbound,
    n          int not null,
    tenant_id  uuid not null,
    file_id    uuid not null references file on delete cascade,
    primary key (inbound_id, n)
);
create index inbound_file_of on inbound_file (file_id);
