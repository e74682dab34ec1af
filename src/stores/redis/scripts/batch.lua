-- Decides a batch of operations on records, one after the other, all at one time.
-- ARGV[1] that time in us, empty: the server's. For each item: KEYS its record and its bucket's set of undecided records, behind
-- them as many keys more as its terms say; ARGV its terms (operation, keys more, arguments more, and what the operation needs),
-- behind them the arguments more. Answers: one string for each item. All of it: docs/internals/redis-layout.md.
--
-- The two usual cases, a first grant and the first answer of its owner, are decided here. All others are decided by what
-- decide.lua sets up, which is done only once an item needs it: a script's functions are made anew each time it runs.
local ACQUIRE, COMPLETE = 1, 5
local GRANTED, LATE, APPLIED = 0, 7, 8
local PROCESSING = 1
local HEADER_BYTES = 212

local now = ARGV[1]
if now == '' then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
else
    now = tonumber(now)
end

local function granted_first(token, lease)
    return struct.pack('<BI8BI8I4I4I8BI8', GRANTED, now, 1, token, 1, 1, now + lease, 0, now)
end

-- The three times of a first grant are the first of a record; the caller made the rest.
local function first_record(token, lease, image) return struct.pack('<I8I8I8', token, now + lease, now) .. image end

-- @decide@

-- The answer of an owner whose first attempt this is: nothing to take back, no turn to append, no chunks.
local function first_answer(key, set, bytes, terms, usage, answer)
    if string.byte(bytes, 25) ~= 1 or string.byte(bytes, 26) ~= PROCESSING then return nil end
    local token, lease_end, created = struct.unpack('<I8I8I8', bytes)
    local op_token = struct.unpack('<I8', terms, 5)
    if token ~= op_token or string.sub(bytes, 149, 164) ~= string.sub(terms, 13, 28) then return nil end
    local keep = struct.unpack('<I8', bytes, 93)
    local canonical, fields, owner, label, failure = struct.unpack('<I4I4I4I4I4', bytes, 117)
    if failure ~= 0 then return nil end
    local expires = now + keep * 1000
    local begin = struct.pack('<I8I8I8', token, 0, created) .. '\1\2\0\0\1\0' .. string.sub(bytes, 31, 35) .. '\0'
    local middle = '\0\0\0' .. string.sub(bytes, 41, 60) .. struct.pack('<I8I8I8', 0, now, expires) ..
        string.sub(bytes, 85, 132) .. struct.pack('<I4I4I4', 0, #usage, 0)
    local rest = string.sub(bytes, 149, HEADER_BYTES + canonical + fields + owner + label) .. usage
    redis.call('SET', key, begin .. '\1' .. middle .. struct.pack('<I4', #answer) .. rest .. answer,
        'PX', math.max(1, math.ceil((expires - now) / 1000)))
    redis.call('ZREM', set, key)
    return struct.pack('<BI8', APPLIED, now) .. begin .. '\2' .. middle .. '\0\0\0\0' .. rest
end

local out = {}
local k, a = 1, 2
while ARGV[a] do
    local terms = ARGV[a]
    local operation, more_keys, more_arguments = struct.unpack('<BI2B', terms)
    local key, set = KEYS[k], KEYS[k + 1]
    local result
    if operation == ACQUIRE then
        local not_after, lease = struct.unpack('<I8I8', terms, 5)
        if now > not_after then
            result = struct.pack('<BI8', LATE, now)
        else
            -- Writes if there is nothing, else reads what there is.
            local bytes = redis.call('SET', key, first_record(now, lease, ARGV[a + 1]), 'NX', 'GET')
            if not bytes then
                redis.call('ZADD', set, now + lease, key)
                result = granted_first(now, lease)
            else
                result = decide(operation, bytes, k, a)
            end
        end
    else
        local bytes = redis.call('GET', key)
        if operation == COMPLETE and more_keys == 0 and bytes and #bytes >= HEADER_BYTES then
            result = first_answer(key, set, bytes, terms, ARGV[a + 1], ARGV[a + 2])
        end
        result = result or decide(operation, bytes, k, a)
    end
    out[#out + 1] = result
    k, a = k + 2 + more_keys, a + 1 + more_arguments
end
return out
