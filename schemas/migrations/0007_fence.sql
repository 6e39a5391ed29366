-- The fence of an agent: seconds after which a sandbox that hears from no gateway has ended its command by itself.
alter table run
    add column fence_s int constraint run_fence_positive check (fence_s > 0),
    -- epochs up to here may have been given out in a time that this database does not remember (`towpath recover`)
    add column epoch_floor int not null default 0,
    add constraint run_restart_needs_fence check (not restartable or fence_s is not null);

alter table sandbox
    add column fence_s int,
    -- when its newest lease was granted; one that never had any may be of a supervisor that knows of no fence, and then silence proves nothing
    add column leased_at timestamptz,
    -- its owner was told that nobody knows whether it is there
    add column unknown_told_at timestamptz,
    -- its host has removed what was left of it
    add column removed_at timestamptz;
update sandbox set removed_at = gone_at where state = 'gone';
create index sandbox_leased on sandbox (leased_at) where state = 'bound' and leased_at is not null;
create index sandbox_watched on sandbox (observed_at) where state = 'bound' and unknown_since is null;
create index sandbox_doubted on sandbox (unknown_since) where state <> 'gone' and unknown_since is not null and unknown_told_at is null;
drop index sandbox_of_host;
create index sandbox_of_host on sandbox (host, created_at) where removed_at is null;

-- What a delivery tells: how a run ended, or a notice while it goes on.
alter table delivery add column about text not null default 'run_ended' constraint delivery_about_known check (about in ('run_ended', 'sandbox_unknown'));
alter table delivery drop constraint delivery_once, add constraint delivery_once unique (run_id, n, about);
