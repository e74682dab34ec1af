-- Removes one thing whose life is over and that the server has not expired itself; checks and removes in one step.
-- ARGV[1] the time, empty: the server's; ARGV[2] what: r KEYS[1] a record, s KEYS[1] a conversation, c KEYS[1] a chunk of
-- token ARGV[3] of the record KEYS[2], u the name KEYS[2] in the set of undecided KEYS[1] although there is no such record.
-- @time@
local IDLE = 30 * 24 * 3600 * 1000000

local function life(key)
    local header = redis.call('GETRANGE', key, 0, 83)
    if header == '' then return nil end
    return (struct.unpack('<I8', header)), struct.unpack('<I8', header, 77)
end

if ARGV[2] == 'r' then
    local _, expires = life(KEYS[1])
    if not expires or expires == 0 or expires > now then return 0 end
elseif ARGV[2] == 's' then
    local head = redis.call('HGET', KEYS[1], 'h')
    if not head then return 0 end
    local _, used = struct.unpack('<I8I8', head)
    if used + IDLE > now then return 0 end
elseif ARGV[2] == 'c' then
    local token, expires = life(KEYS[2])
    if token and string.format('%.0f', token) == ARGV[3] and (expires == 0 or expires > now) then return 0 end
else
    if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
    return redis.call('ZREM', KEYS[1], KEYS[2])
end
return redis.call('DEL', KEYS[1])
