-- KEYS: a list of parked messages, the set of its places; ARGV: the places that are taken out.
for i = 1, #ARGV do
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('ZREM', KEYS[2], ARGV[i])
end
return 1
