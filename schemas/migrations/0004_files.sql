-- Uploads that come in parts. What has come stays, so that a broken one goes on from where it is.
create table upload (
    id           uuid primary key,
    tenant_id    uuid not null references tenant,
    principal_id uuid not null references principal,
    name         text not null,
    media_type   text not null,
    -- as announced; null: not known yet
    length       bigint constraint upload_length_not_negative check (length >= 0),
    received     bigint not null default 0,
    parts        int not null default 0,
    -- the file that it became
    file_id      uuid references file on delete set null,
    completed_at timestamptz,
    changed_at   timestamptz not null default now(),
    created_at   timestamptz not null default now(),
    constraint upload_within_length check (length is null or received <= length)
);
create index upload_age on upload (changed_at);
create index upload_open on upload (tenant_id) where completed_at is null;

create table upload_part (
    upload_id  uuid not null references upload on delete cascade,
    first_byte bigint not null,
    bytes      bigint not null,
    tenant_id  uuid not null,
    object_key text not null references object,
    primary key (upload_id, first_byte)
);

-- What a sandbox asks for an output by, when it is restored into an empty workspace.
alter table output add column id uuid not null default gen_random_uuid();
create unique index output_id on output (id);
