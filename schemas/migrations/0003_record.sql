-- How much of a run's output is kept; beyond it the middle goes.
alter table run add column transcript_bytes bigint not null default 10737418240
    constraint run_transcript_bytes_positive check (transcript_bytes > 0);

alter table transcript add column most_bytes bigint not null default 10737418240;
-- Frames that were sealed and are kept no longer: one range of each epoch.
alter table transcript add column cut_first bigint;
alter table transcript add column cut_last  bigint;
alter table transcript add column cut_bytes bigint not null default 0;
alter table transcript add column cut_reason text
    constraint transcript_cut_reason_known check (cut_reason in ('cap', 'retention'));
alter table transcript add constraint transcript_cut_whole check (
    (cut_first is null) = (cut_last is null) and (cut_first is null) = (cut_reason is null) and (cut_first is not null or cut_bytes = 0)
    and cut_first <= cut_last);

-- Content that nothing refers to any more goes a while later: somebody may be reading it.
alter table object add column unused_at timestamptz;
update object set unused_at = now() where state = 'deleting';

-- Days that things are kept after their run has ended; null: for ever.
alter table tenant add column transcript_days int default 90 constraint tenant_transcript_days_positive check (transcript_days > 0);
alter table tenant add column file_days int default 90 constraint tenant_file_days_positive check (file_days > 0);
alter table tenant add column run_days int default 90 constraint tenant_run_days_positive check (run_days > 0);
-- How far that was carried out: whatever ended before.
alter table tenant add column transcripts_kept_from timestamptz not null default 'epoch';
alter table tenant add column outputs_kept_from timestamptz not null default 'epoch';
create index run_ended on run (tenant_id, ended_at, id) where ended_at is not null;

alter table file alter column object_key drop not null;
alter table file add column expired_at timestamptz;
alter table file add constraint file_expired_whole check ((object_key is null) = (expired_at is not null));
create index file_kept on file (tenant_id, created_at) where expired_at is null;
create index run_file_of_file on run_file (file_id);
create index steer_file_of_file on steer_file (file_id);

-- The host that has it removes it.
alter table workspace add column unwanted boolean not null default false;
create index workspace_unwanted on workspace (pool) where unwanted;
