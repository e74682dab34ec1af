-- 10,000 calls that are completed.
insert into idem
    select 'dup-' || lpad(g::text, 32, '0'), 1, 'owner-1', 1, now(), convert_to(rpad('', 1024, 'x'), 'UTF8'), now() + interval '1 day'
    from generate_series(0, 9999) g;
vacuum analyze idem;
