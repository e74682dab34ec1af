-- wrk script: POSTs one chat completion of about 200 bytes. Environment: KEY=unique gives each request an id of its own, made
-- from RUN and a counter; KEY=<text> gives all of them that id; without KEY there is none. Prints one JSON object.
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer sk-bench"
wrk.body = '{"model":"chat","messages":[{"role":"user","content":"Summarise the notes of this morning\'s meeting in one line, '
    .. 'please, and name who does what."}],"temperature":0.7}'

local key = os.getenv("KEY")
if key == "unique" then
    local before, after
    local run, n = os.getenv("RUN"), 0
    -- The request is put together once: wrk.format for each would cost more than the server under test.
    function init()
        wrk.headers["Idempotency-Key"] = "@"
        local whole = wrk.format()
        local at = string.find(whole, "@", 1, true)
        before, after = string.sub(whole, 1, at - 1) .. run .. "-", string.sub(whole, at + 1)
    end
    function request()
        n = n + 1
        return before .. n .. after
    end
elseif key then
    wrk.headers["Idempotency-Key"] = key
end

function done(summary, latency)
    local e = summary.errors
    io.write(string.format('RESULT {"per_second":%.1f,"p50_us":%d,"p99_us":%d,"requests":%d,"not_2xx":%d,"errors":%d}\n',
        summary.requests / (summary.duration / 1e6), latency:percentile(50), latency:percentile(99), summary.requests,
        e.status, e.connect + e.read + e.write + e.timeout))
end
