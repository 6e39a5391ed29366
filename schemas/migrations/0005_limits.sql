-- Limits and deadlines of a run, as they were when it was accepted.
alter table run add column concurrent int constraint run_concurrent_positive check (concurrent > 0);
alter table run add column max_s int constraint run_max_s_positive check (max_s > 0);
alter table run add column deadline_at timestamptz;
create index run_waiting_limited on run (agent_id) where state = 'queued' and concurrent is not null;

-- Runs of a tenant at a time; null: as many as there is room for.
alter table tenant add column concurrent int constraint tenant_concurrent_positive check (concurrent > 0);
-- Nothing of a paused tenant is started.
alter table tenant add column paused_at timestamptz;

-- One row: what holds for everything.
create table installation (
    only_one  boolean primary key default true constraint installation_is_one check (only_one),
    paused_at timestamptz
);
insert into installation default values;
