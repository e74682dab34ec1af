-- Decides a batch of operations on records, one after the other, all at one time.
-- ARGV[1] that time in us, empty: the server's. For each item: KEYS its record and its bucket's set of undecided records, behind
-- them as many keys more as its terms say; ARGV its terms (operation, keys more, arguments more, and what the operation needs),
-- behind them the arguments more. Answers: one string for each item. All of it: docs/internals/redis-layout.md.
--
-- The two usual cases, a first grant and the first answer of its owner, are decided here. All others are decided by what
-- decide.lua sets up, which is done only once an item needs it: a script's functions are made anew each time it runs.
--
-- A string made here is hashed whole by the server's Lua, byte by byte: what many items have in common is made once.
local KEYS, ARGV = KEYS, ARGV
local byte, sub, pack, unpack = string.byte, string.sub, struct.pack, struct.unpack
local ACQUIRE, COMPLETE = 1, 5
local GRANTED, LATE, APPLIED = 0, 7, 8
local PROCESSING = 1
local HEADER_BYTES = 212

-- @time@

local function granted_first(token, lease)
    return pack('<BI8BI8I4I4I8BI8', GRANTED, now, 1, token, 1, 1, now + lease, 0, now)
end

-- The three times of a first grant are the first of a record; the caller made the rest.
local function first_times(token, lease) return pack('<I8I8I8', token, now + lease, now) end

-- @decide@

-- By its lease in us, what a first grant of this run is.
local firsts = setmetatable({}, {__index = function(all, lease)
    -- As text: a number would be printed anew, with %.17g, for each call.
    local made = {times = first_times(now, lease), lease_end = string.format('%.0f', now + lease), reply = granted_first(now, lease)}
    all[lease] = made
    return made
end})

-- By how long it is kept (in ms, encoded), what an answer of this run is: its times (due, completed, expires), its TTL, the reply's head.
local completions = setmetatable({}, {__index = function(all, keep)
    local expires = now + unpack('<I8', keep) * 1000
    local made = {times = pack('<I8I8I8', 0, now, expires), life = string.format('%.0f', math.max(1, math.ceil((expires - now) / 1000))),
        head = pack('<BI8', APPLIED, now)}
    all[keep] = made
    return made
end})

local NO_LEASE = '\0\0\0\0\0\0\0\0'
local ZERO_16 = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'

-- The answer of an owner whose first attempt this is: nothing to take back, no turn to append, no chunks. Nil: not such a one.
local function first_answer(key, set, bytes, terms, usage, answer)
    local version, status = byte(bytes, 25, 26)
    local token = sub(bytes, 1, 8)
    local nonce = sub(bytes, 149, 164)
    if version ~= 1 or status ~= PROCESSING or token ~= sub(terms, 5, 12) or nonce ~= sub(terms, 13, 28) then return nil end
    if nonce == ZERO_16 then return nil end  -- owned by nobody
    -- Failure, usage, turn and answer are empty.
    if sub(bytes, 133, 148) ~= ZERO_16 then return nil end
    local canonical, fields, owner, label = unpack('<I4I4I4I4', bytes, 117)
    if #bytes ~= HEADER_BYTES + canonical + fields + owner + label then return nil end
    local made = completions[sub(bytes, 93, 100)]
    local created, policy, counts, more = sub(bytes, 17, 24), sub(bytes, 31, 35), sub(bytes, 41, 60), sub(bytes, 85, 132)
    local times, rest = made.times, sub(bytes, 149)
    -- Of the status byte's neighbours, `started` is set: the call may have been processed.
    redis.call('SET', key, token .. NO_LEASE .. created .. '\1\2\0\0\1\0' .. policy .. '\0\1\0\0\0' .. counts .. times .. more ..
        pack('<I4I4I4I4', 0, #usage, 0, #answer) .. rest .. usage .. answer, 'PX', made.life)
    redis.call('ZREM', set, key)
    return made.head .. token .. NO_LEASE .. created .. '\1\2\0\0\1\0' .. policy .. '\0\2\0\0\0' .. counts .. times .. more ..
        pack('<I4I4I4I4', 0, #usage, 0, 0) .. rest .. usage
end

local out = {}
local n, k, a = 0, 1, 2
while ARGV[a] do
    local terms = ARGV[a]
    local operation, more_keys, more_keys_256, more_arguments = byte(terms, 1, 4)
    more_keys = more_keys + 256 * more_keys_256
    local key, set = KEYS[k], KEYS[k + 1]
    local result
    if operation == ACQUIRE then
        local not_after, lease = unpack('<I8I8', terms, 5)
        if now > not_after then
            result = pack('<BI8', LATE, now)
        else
            local first = firsts[lease]
            -- Writes if there is nothing, else reads what there is.
            local bytes = redis.call('SET', key, first.times .. ARGV[a + 1], 'NX', 'GET')
            if not bytes then
                redis.call('ZADD', set, first.lease_end, key)
                result = first.reply
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
    n = n + 1
    out[n] = result
    k, a = k + 2 + more_keys, a + 1 + more_arguments
end
return out
