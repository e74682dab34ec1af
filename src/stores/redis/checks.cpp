#include "stores/redis/checks.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <future>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "base/hash.hpp"
#include "base/time.hpp"

namespace semel::stores::redis {

namespace {

using namespace std::string_literals;

constexpr unsigned version_major_min = 7;
/// Leases are judged by the servers' clock alone: a difference only makes logs and listings hard to
/// compare.
constexpr std::int64_t clock_apart_unremarkable_us = 5'000'000;
constexpr double memory_nearly_full = 0.9;
/// A server's limit on an argument from which on nothing that Semel keeps exceeds it.
constexpr std::uint64_t argument_enough_bytes = std::uint64_t{64} << 20;
/// Of a Cluster, so many hash tags are tried that each server holds some of them.
constexpr unsigned tags_tried_in_a_cluster = 24;
/// What a trial leaves behind if it cannot remove it.
constexpr const char* trial_ttl_ms = "60000";

// ---------------------------------------------------------------- findings of several servers

/// What is true of several servers is said once.
class Sentences {
  public:
    void add(const std::string& server, std::string text) {
        for (auto& [known, servers] : all_) {
            if (known == text) {
                servers += ", " + server;
                return;
            }
        }
        all_.emplace_back(std::move(text), server);
    }
    [[nodiscard]] std::vector<std::string> list() const {
        std::vector<std::string> out;
        for (const auto& [text, servers] : all_) out.push_back("Redis at " + servers + " " + text);
        return out;
    }

  private:
    std::vector<std::pair<std::string, std::string>> all_;
};

/// From what forgets everything to what forgets nothing.
enum class Persistence { none, unseen, snapshots, log_os, log_second, log_always };

/// The weakest of all servers, and what is to be said of them.
struct Look {
    Sentences notices;
    Sentences wrong;
    Persistence persistence = Persistence::log_always;
    std::uint64_t replicas = 0;  ///< The most that one has.
    bool evicts = false;
    bool may_skip_syncs = false;  ///< no-appendfsync-on-rewrite.
};

// ---------------------------------------------------------------- what one server says of itself

using Facts = std::map<std::string, std::string, std::less<>>;

struct Server {
    std::string name;
    Facts info;    ///< Empty: not to be seen.
    Facts config;  ///< The same.

    [[nodiscard]] std::string_view fact(const Facts& facts, std::string_view key) const {
        const auto found = facts.find(key);
        return found == facts.end() ? std::string_view() : std::string_view(found->second);
    }
    [[nodiscard]] std::string_view said(std::string_view key) const { return fact(info, key); }
    [[nodiscard]] std::string_view set(std::string_view key) const { return fact(config, key); }
    [[nodiscard]] std::uint64_t number(std::string_view key) const {
        std::uint64_t value = 0;
        const std::string_view text = said(key);
        std::from_chars(text.data(), text.data() + text.size(), value);
        return value;
    }
};

base::Error refusal(base::ErrorCode code, const std::string& server, const std::string& text) {
    return {.code = code, .detail = "Redis at " + server + " " + text};
}

bool contains(const NoReply& none, std::string_view word) {
    return none.detail.find(word) != std::string::npos;
}

/// The user may run the command, and not on this key ("… to access one of the keys", since 7.2 "…
/// to access a key").
bool key_forbidden(const NoReply& none) {
    return contains(none, "NOPERM") &&
           (contains(none, "one of the keys") || contains(none, "access a key"));
}
/// The user may not run it, or the operator took the command away: not a failure of the server.
bool forbidden(const NoReply& none) {
    return (contains(none, "NOPERM") && !key_forbidden(none)) || contains(none, "unknown command");
}

Facts parse_info(std::string_view text) {
    Facts facts;
    while (!text.empty()) {
        const std::size_t end = text.find('\n');
        std::string_view line = text.substr(0, end);
        text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
        if (line.ends_with('\r')) line.remove_suffix(1);
        const std::size_t colon = line.find(':');
        if (colon != std::string_view::npos)
            facts.emplace(line.substr(0, colon), line.substr(colon + 1));
    }
    return facts;
}

/// Asks for what it may ask. Error: the server does not answer.
base::Result<Server> interview(Client& client, const std::string& name, Look& look) {
    Server server{.name = name, .info = {}, .config = {}};
    const Answer info = client.ask(name, {"INFO"});
    if (const auto* reply = std::get_if<Reply>(&info)) {
        server.info = parse_info(reply->text);
    } else {
        const NoReply& none = std::get<NoReply>(info);
        if (!forbidden(none))
            return refusal(base::ErrorCode::store_unavailable, name,
                           "does not answer: " + none.detail);
        look.notices.add(
            name,
            "does not let this user ask INFO: version, persistence, memory and replicas are not "
            "known, "
            "so nothing is promised for a restart of it; allow it with `ACL SETUSER … +info`");
    }
    const Answer config = client.ask(
        name, {"CONFIG", "GET", "maxmemory", "maxmemory-policy", "appendonly", "appendfsync",
               "save", "no-appendfsync-on-rewrite", "proto-max-bulk-len"});
    if (const auto* reply = std::get_if<Reply>(&config)) {
        for (std::size_t i = 0; i + 1 < reply->elements.size(); i += 2) {
            server.config.emplace(reply->elements[i].text, reply->elements[i + 1].text);
        }
    } else {
        const NoReply& none = std::get<NoReply>(config);
        if (!forbidden(none))
            return refusal(base::ErrorCode::store_unavailable, name,
                           "does not answer: " + none.detail);
        look.notices.add(name,
                         "does not let this user ask CONFIG GET: how it syncs its disk could not "
                         "be seen, and the "
                         "weaker setting is assumed; allow it with `ACL SETUSER … +config|get`, or "
                         "look at appendfsync "
                         "and save yourself");
    }
    return server;
}

// ---------------------------------------------------------------- one look each

base::Result<void> look_at_kind(const Server& server) {
    if (server.info.empty()) return {};
    if (server.said("redis_mode") == "sentinel") {
        return refusal(base::ErrorCode::invalid_argument, server.name,
                       "is a Sentinel, which holds no records: begin store.redis.url with "
                       "redis-sentinel:// and end it with "
                       "#NAME, the master's name there");
    }
    const std::string version(server.said("redis_version"));
    unsigned major = 0;
    std::from_chars(version.data(), version.data() + version.size(), major);
    if (major < version_major_min) {
        return refusal(base::ErrorCode::store_version, server.name,
                       "is version " + version +
                           ", and 7.0 or newer is needed: upgrade it, or name another server");
    }
    if (server.said("role") == "slave") {
        return refusal(base::ErrorCode::invalid_argument, server.name,
                       "is a read-only replica of " + std::string(server.said("master_host")) +
                           ":" + std::string(server.said("master_port")) +
                           ": name the master in store.redis.url, or let sentinels find it "
                           "(redis-sentinel://)");
    }
    return {};
}

base::Result<void> look_at_eviction(const Server& server, bool accepted, Look& look) {
    std::string policy(server.said("maxmemory_policy"));
    if (policy.empty()) policy = server.set("maxmemory-policy");
    if (policy.empty() || policy == "noeviction") return {};
    std::string limit(server.said("maxmemory"));
    if (limit.empty()) limit = server.set("maxmemory");
    if (limit == "0") {
        look.notices.add(server.name,
                         "has maxmemory-policy " + policy +
                             ", which does nothing while maxmemory is 0: set "
                             "`maxmemory-policy noeviction` before somebody limits its memory");
        return {};
    }
    const std::string what = policy.starts_with("volatile-") ? "recorded answers" : "any record";
    std::string words = "may remove " + what + " when its memory is full (maxmemory-policy " +
                        policy +
                        "): an intent whose record is gone is called, and paid, again. Set "
                        "`maxmemory-policy noeviction`";
    if (!accepted) {
        return refusal(base::ErrorCode::invalid_argument, server.name,
                       words +
                           ", or say `accept_eviction: true` in store.redis if second payments are "
                           "acceptable");
    }
    look.evicts = true;
    look.wrong.add(server.name,
                   words + "; it was started all the same because of `accept_eviction: true`");
    return {};
}

Persistence persistence_of(const Server& server) {
    if (server.info.empty() && server.config.empty()) return Persistence::unseen;
    const bool log = server.said("aof_enabled") == "1" || server.set("appendonly") == "yes";
    if (log) {
        const std::string_view sync = server.set("appendfsync");
        if (sync == "always") return Persistence::log_always;
        return sync == "no" ? Persistence::log_os : Persistence::log_second;
    }
    if (server.config.empty()) return Persistence::snapshots;  // at best
    return server.set("save").empty() ? Persistence::none : Persistence::snapshots;
}

void look_at_persistence(const Server& server, Look& look) {
    const Persistence found = persistence_of(server);
    look.persistence = std::min(look.persistence, found);
    const std::string cure = "; set `appendonly yes`, with appendfsync everysec or always";
    switch (found) {
        case Persistence::none:
            look.wrong.add(
                server.name,
                "writes nothing to its disk: a restart of it forgets every record, and every retry "
                "after that is paid again" +
                    cure);
            break;
        case Persistence::unseen:
            break;  // said already
        case Persistence::snapshots:
            look.wrong.add(
                server.name,
                server.config.empty()
                    ? "has no append-only file: a crash of it forgets what came since its last "
                      "snapshot, or everything, and those intents are paid again when they are "
                      "retried" +
                          cure
                    : "keeps snapshots only (save " + std::string(server.set("save")) +
                          "): a crash of it forgets what came since the last one, and those "
                          "intents "
                          "are paid again when they are retried" +
                          cure);
            break;
        case Persistence::log_os:
            look.notices.add(
                server.name,
                "leaves to its system when the append-only file reaches the disk (appendfsync no): "
                "a power cut may forget the last half minute, and those intents are paid again "
                "when they are retried; set `appendfsync everysec` or `always`");
            break;
        case Persistence::log_second:
            if (!server.config.empty()) {
                look.notices.add(
                    server.name,
                    "syncs its append-only file once a second (appendfsync everysec): a power cut "
                    "may forget about the last second, and those intents are paid again when they "
                    "are retried; `appendfsync always` closes that, at the price of waiting for "
                    "the disk");
            }
            break;
        case Persistence::log_always:
            if (server.set("no-appendfsync-on-rewrite") == "yes") {
                look.may_skip_syncs = true;
                look.notices.add(server.name,
                                 "does not sync while it rewrites its append-only file: a power "
                                 "cut in that time "
                                 "may forget records; set `no-appendfsync-on-rewrite no`");
            }
            break;
    }
    if (server.said("aof_last_write_status") == "err") {
        look.wrong.add(
            server.name,
            "could not write its append-only file the last time (aof_last_write_status:err), most "
            "likely for a full disk: it refuses writes until it can");
    }
}

void look_at_replicas(const Server& server, unsigned wait_replicas, Look& look) {
    const std::uint64_t connected = server.number("connected_slaves");
    look.replicas = std::max(look.replicas, connected);
    if (server.info.empty()) return;
    const std::string has =
        "has " + std::to_string(connected) + (connected == 1 ? " replica" : " replicas");
    const std::string wanted = "`wait_replicas: " + std::to_string(wait_replicas) + "`";
    if (connected < wait_replicas) {
        look.wrong.add(server.name, has + " in touch, and " + wanted +
                                        " waits for more: nothing can be claimed until they "
                                        "are back, or wait_replicas is lowered");
    } else if (connected > 0 && wait_replicas == 0) {
        look.wrong.add(
            server.name,
            has +
                " and acknowledges what they do not have yet: a failover may forget claims and "
                "answers, and those intents may be paid again; set `wait_replicas: 1` or more in "
                "store.redis, and min-replicas-to-write 1 on the server");
    } else if (connected > wait_replicas) {
        look.notices.add(
            server.name,
            has + ", and " + wanted +
                " waits for fewer: a failover to one that lacks the last "
                "writes forgets them; waiting for all closes that, and then one that is down "
                "stops all claims");
    }
}

void look_at_memory(const Server& server, Look& look) {
    const std::uint64_t limit = server.number("maxmemory");
    const std::uint64_t used = server.number("used_memory");
    if (used >= limit) return;  // no limit; or full, which the trial says
    if (static_cast<double>(used) < memory_nearly_full * static_cast<double>(limit)) return;
    look.notices.add(
        server.name,
        "is nearly full: " + std::string(server.said("used_memory_human")) + " of " +
            std::string(server.said("maxmemory_human")) +
            " (maxmemory); when it is, nothing can be claimed, and recorded answers are still "
            "replayed. Raise maxmemory, or shorten engine.retention.completed");
}

void look_at_arguments(const Server& server, std::uint64_t& max_bytes, Look& look) {
    const std::string_view text = server.set("proto-max-bulk-len");
    std::uint64_t limit = 0;
    std::from_chars(text.data(), text.data() + text.size(), limit);
    if (limit == 0) return;
    max_bytes = std::min(max_bytes, limit);
    if (limit >= argument_enough_bytes) return;
    look.notices.add(
        server.name,
        "takes no argument above " + std::to_string(limit) +
            " bytes (proto-max-bulk-len): answers are recorded and replayed all the same, but a "
            "turn of /api/chat above that is missing in its conversation, and a longer question is "
            "refused; set `proto-max-bulk-len 512mb`");
}

void look_at_clock(Client& client, const Server& server, Look& look) {
    const Answer answer = client.ask(server.name, {"TIME"});
    const std::int64_t here = base::system_clocks().wall_us();
    const auto* time = std::get_if<Reply>(&answer);
    if (time == nullptr || time->elements.empty()) return;  // the trial says why
    const std::string& text = time->elements.front().text;
    std::int64_t seconds = 0;
    std::from_chars(text.data(), text.data() + text.size(), seconds);
    const std::int64_t ahead = seconds * 1'000'000 - here;
    if (std::abs(ahead) <= clock_apart_unremarkable_us) return;
    look.notices.add(
        server.name,
        "has a clock that is " + std::to_string(std::abs(ahead) / 1'000'000) + " s " +
            (ahead > 0 ? "ahead of" : "behind") +
            " this machine's: leases and retention go by the server's alone, but times in logs and "
            "records will not match; synchronise both (NTP)");
}

// ---------------------------------------------------------------- a trial

/// Sent as EVALSHA, and as EVAL where the server does not know it yet: the user needs both.
constexpr std::string_view trial_source = "return redis.call('GETRANGE', KEYS[1], 0, 2)";
const Script trial_script{
    .name = "trial", .source = trial_source, .sha1 = "af5011b402eef7a5f47185621f33b1b9963b145e"};

struct Step {
    std::string name;  ///< As ACL rules name it.
    Command command;
};

Command plain(const std::vector<std::string>& arguments, std::uint16_t slot, bool writes) {
    Command command;
    command.slot = slot;
    command.writes = writes;
    command.repeatable = true;
    for (const std::string& argument : arguments) append_argument(command.wire, argument);
    command.arguments = static_cast<std::uint32_t>(arguments.size());
    return command;
}

/// What the store and its scripts do, on keys that nobody else has.
std::vector<Step> trial_steps(const std::string& prefix, const std::string& tag,
                              const std::string& nonce) {
    const std::uint16_t slot = slot_of(tag);
    const std::string key = prefix + ":{" + tag + "}:trial:" + nonce;
    const std::string set = key + ":z";
    const std::string hash = key + ":h";
    std::vector<Step> steps;
    const auto reads = [&](std::vector<std::string> arguments) {
        steps.push_back({arguments.front(), plain(arguments, slot, false)});
    };
    const auto writes = [&](std::vector<std::string> arguments) {
        steps.push_back({arguments.front(), plain(arguments, slot, true)});
    };
    writes({"SET", key, "try", "PX", trial_ttl_ms});
    reads({"GET", key});
    reads({"GETRANGE", key, "0", "2"});
    reads({"EXISTS", key});
    writes({"PEXPIRE", key, trial_ttl_ms});
    writes({"ZADD", set, "1", "member"});
    writes({"PEXPIRE", set, trial_ttl_ms});
    reads({"ZRANGEBYSCORE", set, "-inf", "+inf", "LIMIT", "0", "1"});
    reads({"ZRANGEBYLEX", set, "-", "+", "LIMIT", "0", "1"});
    writes({"ZREM", set, "member"});
    writes({"HSET", hash, "field", "value"});
    writes({"PEXPIRE", hash, trial_ttl_ms});
    reads({"HGET", hash, "field"});
    reads({"HMGET", hash, "field"});
    reads({"HEXISTS", hash, "field"});
    writes({"HDEL", hash, "field"});
    reads({"EVAL", std::string(trial_source), "1", key});
    Command script = plain({"1", key}, slot, false);
    script.script = &trial_script;
    steps.push_back({"EVALSHA", std::move(script)});
    writes({"DEL", key, set, hash});
    return steps;
}

std::vector<Answer> wait_for(Client& client, std::vector<Command> commands) {
    std::promise<std::vector<Answer>> answered;
    auto answers = answered.get_future();
    client.submit(std::move(commands),
                  [&answered](std::vector<Answer> all) { answered.set_value(std::move(all)); });
    return answers.get();
}

/// What a step's failure means: an error that forbids opening, or something that may heal by
/// itself. The words are those of refusal.cpp.
std::optional<base::Error> weigh(const NoReply& none, const std::string& servers,
                                 const std::string& prefix, Look& look) {
    if (none.full) {
        look.wrong.add(
            servers,
            "is full (maxmemory is reached): nothing can be claimed until there is room, and "
            "recorded "
            "answers are still replayed; raise maxmemory, or shorten engine.retention.completed");
        return std::nullopt;
    }
    if (contains(none, "cannot save to its disk") || contains(none, "min-replicas-to-write") ||
        none.applied == base::Applied::unknown) {
        look.wrong.add(servers,
                       "takes no writes at the moment, and nothing can be claimed until it does: " +
                           none.detail);
        return std::nullopt;
    }
    if (contains(none, "read-only replica")) {
        return refusal(
            base::ErrorCode::invalid_argument, servers,
            "is a read-only replica: name the master in store.redis.url, or let sentinels find it "
            "(redis-sentinel://)");
    }
    if (key_forbidden(none)) {
        return refusal(base::ErrorCode::invalid_argument, servers,
                       "does not let this user use keys that begin with '" + prefix +
                           ":': allow them with `ACL SETUSER … ~" + prefix +
                           ":*`, or choose another store.redis.prefix");
    }
    return refusal(base::ErrorCode::store_unavailable, servers,
                   "does not do what the store needs: " + none.detail);
}

std::string all_names(const std::vector<Node>& masters) {
    std::string names;
    for (const Node& master : masters) names += (names.empty() ? "" : ", ") + master.name;
    return names;
}

base::Result<void> try_as_this_user(Client& client, const std::string& prefix,
                                    unsigned wait_replicas, Look& look) {
    const std::vector<Node> masters = client.masters();
    const std::string servers = all_names(masters);
    std::vector<std::string> missing;
    const auto note_missing = [&missing](const std::string& name) {
        if (std::find(missing.begin(), missing.end(), name) == missing.end())
            missing.push_back(name);
    };
    for (const Node& master : masters) {
        for (const std::vector<std::string>& arguments :
             {std::vector{"TIME"s}, std::vector{"SCAN"s, "0"s, "COUNT"s, "1"s}}) {
            const Answer answer = client.ask(master.name, arguments);
            const auto* none = std::get_if<NoReply>(&answer);
            if (none == nullptr) continue;
            if (!forbidden(*none))
                return refusal(base::ErrorCode::store_unavailable, master.name,
                               "does not answer: " + none->detail);
            note_missing(arguments.front());
        }
    }
    const std::string nonce = base::hex(base::random_bytes(8));
    const unsigned tags = masters.size() > 1 ? tags_tried_in_a_cluster : 1;
    for (unsigned i = 0; i < tags; ++i) {
        std::vector<Step> steps = trial_steps(prefix, "trial" + std::to_string(i), nonce);
        std::vector<Command> commands;
        for (Step& step : steps) commands.push_back(std::move(step.command));
        const std::vector<Answer> answers = wait_for(client, std::move(commands));
        SEMEL_ASSERT(answers.size() == steps.size(), "a client answers each command");
        bool judged = false;
        for (std::size_t n = 0; n < steps.size(); ++n) {
            const auto* none = std::get_if<NoReply>(&answers[n]);
            if (none == nullptr) continue;
            if (forbidden(*none)) {
                note_missing(steps[n].name);
                continue;
            }
            if (judged) continue;  // the rest of one tag fails for the same reason
            judged = true;
            if (auto error = weigh(*none, servers, prefix, look)) return *error;
        }
    }
    if (wait_replicas > 0) {
        const Answer answer = client.ask(masters.front().name, {"WAIT", "0", "1"});
        const auto* none = std::get_if<NoReply>(&answer);
        if (none != nullptr && forbidden(*none)) note_missing("WAIT");
    }
    if (missing.empty()) return {};
    std::string commands;
    std::string rules;
    for (const std::string& name : missing) {
        commands += (commands.empty() ? "" : ", ") + name;
        std::string lower = name;
        std::transform(lower.begin(), lower.end(), lower.begin(),
                       [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
        rules += " +" + lower;
    }
    return refusal(base::ErrorCode::invalid_argument, servers,
                   "does not let this user run " + commands +
                       ", which the store needs: allow it with `ACL SETUSER …" + rules +
                       "`; a command that was renamed or disabled in redis.conf must be there "
                       "under its own name");
}

// ---------------------------------------------------------------- what it all promises

core::Durability durability_of(const Look& look, unsigned wait_replicas) {
    core::Durability out;
    std::string& words = out.summary;
    words = "a claim or a recorded answer survives the death of a gateway; ";
    switch (look.persistence) {
        case Persistence::none:
            words += "any restart of redis-server takes all of them";
            break;
        case Persistence::unseen:
            words += "what a restart of redis-server takes could not be seen";
            break;
        case Persistence::snapshots:
            words +=
                "a kill of redis-server or a power cut takes what came since its last snapshot";
            break;
        case Persistence::log_os:
            words +=
                "a kill of redis-server takes none, a power cut what its system had not written "
                "yet";
            break;
        case Persistence::log_second:
            words +=
                "a kill of redis-server takes none, except what waits (2 s at most) while its disk "
                "is busy with a sync, "
                "and a power cut about the last second";
            break;
        case Persistence::log_always:
            words += look.may_skip_syncs ? "a kill of redis-server takes none, a power cut only "
                                           "during a rewrite of its file"
                                         : "it is on Redis' disk before it is acknowledged, so a "
                                           "kill of redis-server and a "
                                           "power cut take none";
            break;
    }
    if (look.replicas == 0) {
        words += "; there is no replica to fail over to";
    } else if (wait_replicas == 0) {
        words += "; a failover may take those that no replica had yet (wait_replicas: 0)";
    } else {
        words += "; " + std::to_string(wait_replicas) + " of " + std::to_string(look.replicas) +
                 (look.replicas == 1 ? " replica has" : " replicas have") +
                 " it before it is acknowledged";
    }
    if (look.evicts) words += "; and a full memory evicts them";
    out.survives_process_crash = look.persistence >= Persistence::log_os;
    out.survives_power_cut = look.persistence == Persistence::log_always && !look.may_skip_syncs;
    out.survives_failover = look.replicas <= wait_replicas;
    return out;
}

}  // namespace

base::Result<Findings> check_servers(Client& client, const std::string& prefix,
                                     bool accept_eviction, unsigned wait_replicas) {
    const std::vector<Node> masters = client.masters();
    if (masters.empty()) {
        return base::Error{
            .code = base::ErrorCode::store_unavailable,
            .detail = "no Redis master is known; look at the Sentinel's or the Cluster's state"};
    }
    Findings findings;
    Look look;
    for (const Node& master : masters) {
        const auto server = interview(client, master.name, look);
        if (!server) return server.error();
        if (findings.version.empty()) findings.version = server->said("redis_version");
        if (auto ok = look_at_kind(*server); !ok) return ok.error();
        if (auto ok = look_at_eviction(*server, accept_eviction, look); !ok) return ok.error();
        look_at_persistence(*server, look);
        look_at_replicas(*server, wait_replicas, look);
        look_at_memory(*server, look);
        look_at_arguments(*server, findings.argument_max_bytes, look);
        look_at_clock(client, *server, look);
    }
    if (auto ok = try_as_this_user(client, prefix, wait_replicas, look); !ok) return ok.error();
    findings.durability = durability_of(look, wait_replicas);
    findings.notices = look.notices.list();
    findings.wrong = look.wrong.list();
    return findings;
}

}  // namespace semel::stores::redis
