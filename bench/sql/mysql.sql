-- The references' table: the usual shape. Made anew before each run.
create database if not exists reference;
use reference;
drop table if exists idem;
create table idem (
    k varchar(64) character set ascii collate ascii_bin primary key, status tinyint not null, owner varchar(64) not null,
    token bigint not null, lease_until bigint not null, result blob, expires_at bigint not null
) engine = innodb;
