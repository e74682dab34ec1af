-- 10,000 calls that are completed.
use reference;
insert into idem
    select concat('dup-', lpad(seq, 32, '0')), 1, 'owner-1', 1, 0, repeat('x', 1024), 0 from seq_0_to_9999;
