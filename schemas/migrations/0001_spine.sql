-- Expand first, contract in a later release; see schemas/README.md. One writer for each table: the room named above it.

-- tenant ------------------------------------------------------------------------------------------------------------------------------
create table tenant (
    id         uuid primary key,
    name       text not null constraint tenant_name_key unique,
    created_at timestamptz not null default now()
);

create table principal (
    id         uuid primary key,
    tenant_id  uuid not null references tenant,
    kind       text not null constraint principal_kind_known check (kind in ('user', 'service', 'system')),
    name       text not null,
    created_at timestamptz not null default now(),
    constraint principal_name_key unique (tenant_id, name)
);

-- The secret itself is never stored, only its SHA-256.
create table token (
    id           uuid primary key,
    tenant_id    uuid not null references tenant,
    principal_id uuid not null references principal,
    sha256       bytea not null constraint token_sha256_key unique,
    scopes       text[] not null constraint token_scopes_known check (scopes <@ array ['runs', 'terminal', 'admin']),
    expires_at   timestamptz not null,
    revoked_at   timestamptz,
    created_at   timestamptz not null default now()
);

-- agent -------------------------------------------------------------------------------------------------------------------------------
create table agent (
    id         uuid primary key,
    tenant_id  uuid not null references tenant,
    name       text not null,
    version    int not null constraint agent_version_positive check (version > 0),
    paused_at  timestamptz,
    deleted_at timestamptz,
    created_at timestamptz not null default now(),
    constraint agent_name_key unique (tenant_id, name)
);

create table agent_version (
    agent_id   uuid not null references agent,
    version    int not null,
    tenant_id  uuid not null references tenant,
    definition jsonb not null,
    created_by uuid not null references principal,
    created_at timestamptz not null default now(),
    primary key (agent_id, version)
);

-- session -----------------------------------------------------------------------------------------------------------------------------
create table session (
    id           uuid primary key,
    tenant_id    uuid not null references tenant,
    agent_id     uuid not null references agent,
    agent_name   text not null,
    principal_id uuid not null references principal,
    created_at   timestamptz not null default now()
);
create index session_list on session (tenant_id, created_at desc, id desc);

-- run ---------------------------------------------------------------------------------------------------------------------------------
create table run (
    id               uuid primary key,
    tenant_id        uuid not null references tenant,
    session_id       uuid not null references session,
    agent_id         uuid not null,
    agent_name       text not null,
    agent_version    int not null,
    principal_id     uuid not null references principal,
    mode             text not null constraint run_mode_known check (mode in ('one_shot', 'interactive')),
    backend          text not null constraint run_backend_known check (backend in ('process', 'container', 'kubernetes')),
    priority         smallint not null default 0 constraint run_priority_range check (priority between -100 and 100),
    prompt           text not null,
    labels           jsonb not null default '{}',
    -- the agent's sandbox settings, in the version that the run started with
    sandbox          jsonb not null,
    start_s          int not null,
    grace_s          int not null,
    restartable      boolean not null default false,

    state            text not null constraint run_state_known check (state in
        ('queued', 'starting', 'running', 'stopping', 'finishing', 'succeeded', 'failed', 'canceled', 'timed_out')),
    wanted           text constraint run_wanted_known check (wanted in ('canceled', 'timed_out')),
    wanted_at        timestamptz,
    reason           text,
    message          text,
    waiting_for      text,
    revision         bigint not null,
    epoch            int not null default 0,
    -- the sandbox of this epoch may still execute: its slot is taken
    active           boolean not null default false,
    incarnation      text,
    starts           int not null default 0,
    restarts         int not null default 0,
    exited           boolean not null default false,
    exit_code        int,
    exit_signal      int,
    exit_oom         boolean,
    exit_reason      text,
    exit_message     text,
    traceparent      text,
    created_at       timestamptz not null default now(),
    started_at       timestamptz,
    ended_at         timestamptz,

    constraint run_ended_has_time check ((state in ('succeeded', 'failed', 'canceled', 'timed_out')) = (ended_at is not null)),
    constraint run_started_has_time check (state not in ('running', 'stopping', 'finishing') or started_at is not null),
    constraint run_starting_has_epoch check (state not in ('starting', 'running', 'stopping', 'finishing') or epoch > 0),
    constraint run_executing_is_active check (state not in ('starting', 'running', 'stopping') or active),
    constraint run_waiting_is_inactive check (state not in ('queued', 'finishing') or not active),
    constraint run_executing_is_bound check (state not in ('running', 'stopping') or incarnation is not null),
    constraint run_stopping_wants check (state <> 'stopping' or wanted is not null),
    constraint run_wanted_has_time check ((wanted is null) = (wanted_at is null)),
    constraint run_only_queued_waits check ((state = 'queued') = (waiting_for is not null)),
    constraint run_exit_only_once_exited check (exited or (exit_code is null and exit_signal is null and exit_oom is null))
);
-- One live run for each session: 409 session_busy.
create unique index run_one_live on run (session_id)
    where state in ('queued', 'starting', 'running', 'stopping', 'finishing');
create index run_waiting on run (backend, tenant_id, priority desc, created_at, id) where state = 'queued';
create index run_waiting_session on run (session_id) where state = 'queued';
create index run_unsettled on run (state, created_at) where state in ('starting', 'running', 'stopping', 'finishing');
create index run_held on run (id) where active and state in ('succeeded', 'failed', 'canceled', 'timed_out');
create index run_list on run (tenant_id, created_at desc, id desc);
create index run_of_session on run (session_id, created_at);

-- The table of moves, as the database knows it; workers/run/src/state.rs decides, this refuses.
create function run_refuse_impossible_move() returns trigger language plpgsql as $$
begin
    if new.state <> old.state and not (old.state, new.state) in (
        ('queued', 'starting'), ('queued', 'canceled'), ('queued', 'timed_out'),
        ('starting', 'running'), ('starting', 'canceled'), ('starting', 'timed_out'), ('starting', 'failed'), ('starting', 'queued'),
        ('running', 'finishing'), ('running', 'stopping'), ('running', 'queued'),
        ('stopping', 'finishing'), ('stopping', 'canceled'), ('stopping', 'timed_out'),
        ('finishing', 'succeeded'), ('finishing', 'failed'), ('finishing', 'canceled'), ('finishing', 'timed_out')
    ) then
        raise exception 'run % cannot move from % to %', old.id, old.state, new.state using errcode = 'check_violation', constraint = 'run_move_known';
    end if;
    if new.state <> old.state and new.revision <= old.revision then
        raise exception 'run % moved without a new revision', old.id using errcode = 'check_violation', constraint = 'run_move_has_revision';
    end if;
    if new.epoch < old.epoch or (new.epoch > old.epoch and not (old.state = 'queued' and new.state = 'starting')) then
        raise exception 'run %: epoch % to % outside an admission', old.id, old.epoch, new.epoch using errcode = 'check_violation', constraint = 'run_epoch_grows';
    end if;
    if old.wanted is not null and new.wanted is distinct from old.wanted then
        raise exception 'run %: wanted is set once', old.id using errcode = 'check_violation', constraint = 'run_wanted_once';
    end if;
    if old.incarnation is not null and new.epoch = old.epoch and new.incarnation is distinct from old.incarnation then
        raise exception 'run %: another incarnation of epoch %', old.id, old.epoch using errcode = 'check_violation', constraint = 'run_one_incarnation';
    end if;
    return new;
end $$;
create trigger run_move before update of state, epoch, wanted, incarnation, revision on run
    for each row execute function run_refuse_impossible_move();

create table run_history (
    run_id     uuid not null references run,
    revision   bigint not null,
    tenant_id  uuid not null,
    at         timestamptz not null default now(),
    from_state text,
    to_state   text not null,
    cause      text not null,
    actor      text not null,
    epoch      int not null,
    reason     text,
    detail     jsonb,
    primary key (run_id, revision)
);

create table run_step (
    run_id    uuid not null references run,
    epoch     int not null,
    step      text not null,
    tenant_id uuid not null,
    at        timestamptz not null default now(),
    detail    text,
    primary key (run_id, epoch, step)
);

create table run_result (
    run_id    uuid primary key references run,
    tenant_id uuid not null,
    epoch     int not null,
    text      text not null,
    truncated boolean not null
);

-- Where a run's result goes when it settles; the secret is sealed (chassis::secret).
create table run_target (
    run_id    uuid not null references run,
    n         int not null,
    tenant_id uuid not null,
    kind      text not null constraint run_target_kind_known check (kind in ('webhook')),
    url       text not null,
    secret    bytea,
    primary key (run_id, n)
);

create table pool (
    name     text primary key,
    backend  text not null,
    host     text not null,
    capacity int not null constraint pool_capacity_not_negative check (capacity >= 0),
    -- a host that was not heard of for 30 s gets no runs
    heard_at timestamptz not null default now()
);

-- Slots are rows, never counters.
create table slot (
    run_id      uuid not null references run,
    epoch       int not null,
    pool        text not null references pool,
    tenant_id   uuid not null,
    admitted_at timestamptz not null default now(),
    primary key (run_id, epoch)
);
create index slot_of_pool on slot (pool, tenant_id);

-- Where a session's workspace is and which run holds it.
create table workspace (
    session_id uuid primary key references session,
    tenant_id  uuid not null,
    pool       text not null references pool,
    run_id     uuid,
    epoch      int,
    constraint workspace_held_whole check ((run_id is null) = (epoch is null))
);

-- steer -------------------------------------------------------------------------------------------------------------------------------
create table steer (
    id           uuid primary key,
    tenant_id    uuid not null,
    run_id       uuid not null references run,
    ordinal      bigint not null,
    message      text not null,
    state        text not null constraint steer_state_known check (state in ('queued', 'sent', 'written', 'read', 'expired', 'unknown')),
    reason       text,
    epoch        int,
    principal_id uuid not null references principal,
    created_at   timestamptz not null default now(),
    changed_at   timestamptz not null default now(),
    constraint steer_ordinal_key unique (run_id, ordinal),
    constraint steer_sent_has_epoch check (state not in ('sent', 'written', 'read') or epoch is not null)
);
create index steer_open on steer (run_id, ordinal) where state in ('queued', 'sent', 'written');

-- sandbox -----------------------------------------------------------------------------------------------------------------------------
create table sandbox (
    run_id        uuid not null references run,
    epoch         int not null,
    tenant_id     uuid not null,
    session_id    uuid not null,
    host          text not null,
    backend       text not null,
    walls         jsonb not null,
    state         text not null constraint sandbox_state_known check (state in ('asked', 'bound', 'gone')),
    -- nobody needs it any more: bound ones are told, others fenced
    unwanted      boolean not null default false,
    key_sha256    bytea,
    incarnation   text,
    identity      jsonb,
    observed      text not null default 'unknown' constraint sandbox_observed_known check (observed in ('present', 'absent', 'unknown')),
    observed_at   timestamptz,
    -- first of an unbroken row of unknown observations
    unknown_since timestamptz,
    last_heard_at timestamptz,
    -- the host can never start it, and why
    refusal         text,
    refusal_message text,
    created_at    timestamptz not null default now(),
    gone_at       timestamptz,
    primary key (run_id, epoch),
    constraint sandbox_bound_whole check (state <> 'bound' or (incarnation is not null and key_sha256 is not null)),
    constraint sandbox_gone_has_time check ((state = 'gone') = (gone_at is not null))
);
create index sandbox_of_host on sandbox (host, created_at) where state <> 'gone';

-- transcript --------------------------------------------------------------------------------------------------------------------------
create table transcript (
    run_id     uuid not null references run,
    epoch      int not null,
    tenant_id  uuid not null,
    -- open: more may come; lost: the epoch is over and its end record will not come, take what there is; closed: nothing more
    state      text not null constraint transcript_state_known check (state in ('open', 'lost', 'closed')),
    last_seq   bigint not null default 0,
    bytes      bigint not null default 0,
    end_record jsonb,
    gap        jsonb,
    opened_at  timestamptz not null default now(),
    closed_at  timestamptz,
    primary key (run_id, epoch),
    constraint transcript_closed_whole check ((state = 'closed') = (closed_at is not null)),
    constraint transcript_closed_says_how check (state <> 'closed' or end_record is not null or gap is not null)
);
create index transcript_unsealed on transcript (opened_at) where state <> 'closed';

create table object (
    key        text primary key,
    tenant_id  uuid not null,
    state      text not null constraint object_state_known check (state in ('writing', 'live', 'deleting')),
    size       bigint,
    created_at timestamptz not null default now()
);
create index object_not_live on object (created_at) where state <> 'live';

create table chunk (
    run_id     uuid not null,
    epoch      int not null,
    first_seq  bigint not null,
    last_seq   bigint not null,
    tenant_id  uuid not null,
    first_byte bigint not null,
    bytes      bigint not null,
    object_key text not null references object,
    size       bigint not null,
    sha256     bytea not null,
    first_at   timestamptz not null,
    last_at    timestamptz not null,
    primary key (run_id, epoch, first_seq),
    foreign key (run_id, epoch) references transcript,
    constraint chunk_not_empty check (last_seq >= first_seq)
);

-- delivery ----------------------------------------------------------------------------------------------------------------------------
create table delivery (
    id              uuid primary key,
    tenant_id       uuid not null,
    run_id          uuid not null references run,
    n               int not null,
    kind            text not null constraint delivery_kind_known check (kind in ('webhook')),
    target          text not null,
    secret          bytea,
    body            jsonb,
    state           text not null constraint delivery_state_known check (state in ('pending', 'sending', 'unknown', 'delivered', 'dead')),
    attempts        int not null default 0,
    answer          text,
    next_attempt_at timestamptz,
    -- fences a sender that slept through its claim
    claim           bigint not null default 0,
    traceparent     text,
    created_at      timestamptz not null default now(),
    ended_at        timestamptz,
    constraint delivery_once unique (run_id, n),
    constraint delivery_ended_has_time check ((state in ('delivered', 'dead')) = (ended_at is not null)),
    constraint delivery_open_has_due check ((state in ('delivered', 'dead')) = (next_attempt_at is null))
);
create index delivery_due on delivery (next_attempt_at) where next_attempt_at is not null;

-- file --------------------------------------------------------------------------------------------------------------------------------
create table file (
    id            uuid primary key,
    tenant_id     uuid not null,
    principal_id  uuid not null references principal,
    name          text not null,
    original_name text not null,
    media_type    text not null,
    size          bigint not null,
    sha256        bytea not null,
    object_key    text not null references object,
    created_at    timestamptz not null default now()
);
create index file_of_object on file (object_key);

create table run_file (
    run_id    uuid not null references run,
    n         int not null,
    tenant_id uuid not null,
    file_id   uuid not null references file,
    primary key (run_id, n)
);

create table steer_file (
    steer_id  uuid not null references steer,
    n         int not null,
    tenant_id uuid not null,
    file_id   uuid not null references file,
    primary key (steer_id, n)
);

create table output (
    run_id     uuid not null references run,
    name       text not null,
    tenant_id  uuid not null,
    epoch      int not null,
    size       bigint not null,
    sha256     bytea,
    object_key text references object,
    status     text not null constraint output_status_known check (status in ('stored', 'unavailable')),
    reason     text,
    created_at timestamptz not null default now(),
    primary key (run_id, name),
    constraint output_stored_whole check (status <> 'stored' or (object_key is not null and sha256 is not null)),
    constraint output_unavailable_says_why check (status <> 'unavailable' or reason is not null)
);
create index output_of_object on output (object_key);

-- chassis -----------------------------------------------------------------------------------------------------------------------------
create table outbox (
    id          bigint generated always as identity primary key,
    subject     text not null,
    body        jsonb not null,
    traceparent text,
    created_at  timestamptz not null default now()
);

create table timer (
    kind   text not null,
    key    text not null,
    due_at timestamptz not null,
    primary key (kind, key)
);
create index timer_due on timer (due_at);

create table lease (
    name  text primary key,
    owner uuid not null,
    -- grows with every new owner; what an owner does carries it
    fence bigint not null,
    until timestamptz not null
);

create table idempotency (
    tenant_id  uuid not null,
    route      text not null,
    key        text not null,
    sha256     bytea not null,
    thing      uuid not null,
    created_at timestamptz not null default now(),
    primary key (tenant_id, route, key)
);
create index idempotency_age on idempotency (created_at);

-- Failed attempts of a message; a row exists only between its first failure and its end.
create table attempt (
    role    text not null,
    message text not null,
    count   int not null,
    error   text not null,
    at      timestamptz not null default now(),
    primary key (role, message)
);

create table dead (
    id         bigint generated always as identity primary key,
    role       text not null,
    subject    text not null,
    body       jsonb not null,
    reason     text not null,
    attempts   int not null,
    created_at timestamptz not null default now()
);
