-- The references' table: the usual shape. Made anew before each run.
drop table if exists idem;
create table idem (
    key text primary key, status smallint not null, owner text not null, token bigint not null,
    lease_until timestamptz not null, result bytea, expires_at timestamptz not null
);
alter table idem alter column result set storage external;  -- 1 KiB is not compressed
