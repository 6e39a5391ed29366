-- Where a terminal's screen was last recorded within a chunk: whoever comes late begins there.
alter table chunk add column screen_seq bigint;
create index chunk_screen on chunk (run_id, epoch, screen_seq) where screen_seq is not null;
