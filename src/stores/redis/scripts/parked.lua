-- KEYS: a list of parked messages, the set of its places; ARGV: the first place, limit. Place and bytes of each message, in order.
local places = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '+', 'LIMIT', 0, ARGV[2])
local out = {}
for i = 1, #places do
    out[2 * i - 1] = places[i]
    out[2 * i] = redis.call('HGET', KEYS[1], places[i])
end
return out
