#include "config/config.hpp"
#include "config/consumer_reader.hpp"
#include "config/document.hpp"
#include "config/stores.hpp"
#include "config/urls.hpp"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

namespace semel::config {

namespace {

using std::chrono::hours;

constexpr std::size_t config_max_bytes = 1 << 20;
constexpr std::size_t secret_advised_bytes = 16;
constexpr unsigned threads_max = 1024;
constexpr milliseconds lease_min{100};
constexpr milliseconds lease_max{hours{1}};
/// Others take over on a shared store, over a network, from a process that may only be slow.
constexpr milliseconds shared_lease_default{30000};
constexpr const char* shared_spool_default = "./semel-spool";
constexpr milliseconds cleanup_every_min{100};
constexpr milliseconds cleanup_window_min{std::chrono::minutes{1}};
constexpr milliseconds cleanup_day{hours{24}};
constexpr std::size_t cleanup_step_max = 10'000;

void read_address(const Map& map, std::string_view key, Address& into) {
    std::string text;
    map.read(key, text);
    if (map.find(key) == nullptr) return;
    const auto address = address_of(text);
    if (!address) {
        map.refuse(key, ": " + quoted(text) +
                            " is no address: write HOST:PORT, such as 127.0.0.1:8787 or [::1]:8787 "
                            "(port 0: any free one)");
    }
    into = *address;
}

PeerConfig read_peer(const Map& root, bool shared, std::vector<std::string>& warnings) {
    PeerConfig peer;
    const YAML::Node* node = root.find("peer");
    if (node == nullptr) return peer;
    const Map map(root.document(), *node, "peer", {"listen", "advertise"});
    read_address(map, "listen", peer.listen);
    std::string advertise = "auto";
    map.read("advertise", advertise);
    if (advertise != "auto") {
        const bool bracketed =
            advertise.size() > 2 && advertise.front() == '[' && advertise.back() == ']';
        const std::string bare = bracketed ? advertise.substr(1, advertise.size() - 2) : advertise;
        if (const auto address = address_of(advertise); address && address->port != 0) {
            peer.advertise_host = address->host;
            peer.advertise_port = address->port;
        } else if (is_host(bare, bracketed)) {
            peer.advertise_host = bare;
        } else {
            map.refuse("advertise", ": " + quoted(advertise) +
                                        " is neither auto nor HOST or HOST:PORT, such as 10.0.0.7 "
                                        "or gateway-1.internal:8789");
        }
        if (Address{peer.advertise_host, 0}.wildcard())
            map.refuse("advertise", ": " + quoted(advertise) +
                                        " is no address that another gateway could connect to");
    }
    if (!shared)
        warnings.emplace_back(
            "peer: the store is not shared, so no other gateway exists; the key has no effect");
    return peer;
}

/// HH:MM as the time since midnight; nullopt: it is none.
std::optional<std::chrono::minutes> time_of_day(std::string_view text) {
    if (text.size() != 5 || text[2] != ':') return std::nullopt;
    const std::string_view hour = text.substr(0, 2);
    const std::string_view minute = text.substr(3);
    if (!all_digits(hour) || !all_digits(minute) || hour > "23" || minute > "59")
        return std::nullopt;
    const auto number = [](std::string_view two) { return (two[0] - '0') * 10 + (two[1] - '0'); };
    return std::chrono::minutes{number(hour) * 60 + number(minute)};
}

CleanupConfig read_cleanup(const Map& map) {
    CleanupConfig cleanup;
    milliseconds every{0};
    map.read("every", every, cleanup_every_min, cleanup_day);
    if (map.find("every") != nullptr) cleanup.every = every;
    if (map.find("at") != nullptr) {
        std::string text;
        map.read("at", text);
        cleanup.at = time_of_day(text);
        if (!cleanup.at)
            map.refuse(
                "at", ": " + quoted(text) + " is no time of day: write HH:MM (UTC), such as 03:00");
    }
    map.read("for", cleanup.window, cleanup_window_min, cleanup_day);
    if (map.find("for") != nullptr && !cleanup.at)
        map.refuse("for", " is how long clean-up may run from `at` on: give `at`, or remove it");
    map.read_count<std::size_t>("step", cleanup.step, cleanup_step_max);
    if (cleanup.step == 0) map.refuse("step", ": '0' would remove nothing: write 1 to 10000");
    return cleanup;
}

EngineConfig read_engine(const Map& root, bool shared, std::vector<std::string>& warnings) {
    EngineConfig engine;
    if (shared) engine.lease = shared_lease_default;
    const YAML::Node* node = root.find("engine");
    if (node == nullptr) return engine;
    const Map map(root.document(), *node, "engine",
                  {"lease", "retention", "secret_env", "cleanup"});
    map.read("lease", engine.lease, lease_min, lease_max);
    if (const YAML::Node* at = map.find("cleanup")) {
        const Map cleanup(root.document(), *at, "engine.cleanup", {"every", "at", "for", "step"});
        engine.cleanup = read_cleanup(cleanup);
    }
    if (const YAML::Node* at = map.find("retention")) {
        const Map retention(root.document(), *at, "engine.retention", {"completed", "failed"});
        retention.read("completed", engine.retention_completed, milliseconds{1});
        retention.read("failed", engine.retention_failed, milliseconds{1});
    }
    if (const YAML::Node* at = map.find("secret_env")) {
        engine.secret = map.document().variable(*at, "engine.secret_env");
        if (engine.secret.size() < secret_advised_bytes) {
            warnings.push_back(
                "engine.secret_env: the secret has fewer than 16 characters and can be guessed");
        }
    }
    for (const auto& [name, retention] : {std::pair("completed", engine.retention_completed),
                                          std::pair("failed", engine.retention_failed)}) {
        if (retention > engine.lease) continue;
        root.refuse(
            "engine",
            std::string(".retention.") + name +
                " must be longer than engine.lease: a record must outlive the call that writes it");
    }
    return engine;
}

std::vector<ClientConfig> read_clients(const Map& root) {
    std::vector<ClientConfig> clients;
    for (const YAML::Node& item : root.items("clients")) {
        const Map map(root.document(), item, "clients[" + std::to_string(clients.size()) + "]",
                      {"name", "token_env", "may_name_users"});
        ClientConfig client;
        client.name = map.required_name("name");
        if (client.name == "anonymous")
            map.refuse("name",
                       ": 'anonymous' is the tenant of callers without a credential; take another");
        for (const YAML::Node& name : map.items("token_env", true)) {
            client.tokens.push_back(root.document().variable(name, map.path("token_env")));
        }
        if (client.tokens.empty())
            map.refuse("token_env",
                       " must name the environment variable that holds the client's token");
        map.read("may_name_users", client.may_name_users);
        for (const ClientConfig& other : clients) {
            if (other.name == client.name)
                map.refuse("name", ": two clients are called " + quoted(client.name));
            for (const std::string& token : client.tokens) {
                if (std::find(other.tokens.begin(), other.tokens.end(), token) !=
                    other.tokens.end()) {
                    map.refuse("token_env",
                               ": clients " + quoted(other.name) + " and " + quoted(client.name) +
                                   " have the same token; whose call it is could not be told");
                }
            }
        }
        clients.push_back(std::move(client));
    }
    if (root.find("clients") != nullptr && clients.empty()) {
        root.refuse("clients", " is empty, so nobody could call: name a client or remove the key");
    }
    return clients;
}

UpstreamConfig read_upstream(const Map& map, std::vector<std::string>& warnings) {
    constexpr milliseconds least{1};
    UpstreamConfig upstream;
    upstream.name = map.required_name("name");
    enum class Dialect { openai } dialect = Dialect::openai;
    map.read("dialect", dialect, {{"openai", Dialect::openai}}, {"anthropic"});
    map.read("base_url", upstream.base_url);
    const auto url = base_url_of(upstream.base_url);
    if (!url) {
        map.refuse("base_url",
                   " must be http(s)://HOST[:PORT][/PATH] without user, query and fragment, such "
                   "as https://api.openai.com");
    }
    while (upstream.base_url.ends_with('/')) upstream.base_url.pop_back();
    if (const YAML::Node* at = map.find("api_key_env")) {
        upstream.api_key = map.document().variable(*at, map.path("api_key_env"));
        upstream.has_api_key = true;
    }
    for (const YAML::Node& item : map.items("models", true)) {
        upstream.models.push_back(map.document().text(item, map.path("models")));
        if (upstream.models.back().empty())
            map.refuse("models", " holds an empty pattern; '*' matches every model");
    }
    if (map.find("models") == nullptr) upstream.models.emplace_back("*");
    if (upstream.models.empty())
        map.refuse(
            "models",
            " is empty, so the upstream would never be used: name a pattern or remove the key");
    upstream.stream_usage =
        url->host == "api.openai.com" ? StreamUsage::inject : StreamUsage::passive;
    map.read("stream_usage", upstream.stream_usage,
             {{"inject", StreamUsage::inject}, {"passive", StreamUsage::passive}});
    map.read("auth", upstream.auth,
             {{"bearer", UpstreamAuth::bearer}, {"api-key", UpstreamAuth::api_key}});
    map.read("idempotency_key", upstream.idempotency_key,
             {{"drop", UpstreamKey::drop}, {"forward", UpstreamKey::forward}});
    map.read("connect_timeout", upstream.connect_timeout, least);
    map.read("first_byte_timeout", upstream.first_byte_timeout, least);
    map.read("idle_timeout", upstream.idle_timeout, least);
    map.read("ca_file", upstream.ca_file);

    const bool in_the_clear = !url->tls && !Address{url->host, 0}.loopback();
    if (in_the_clear && upstream.has_api_key) {
        warnings.push_back(map.path("base_url") + ": the API key of upstream " + upstream.name +
                           " travels unencrypted; use https");
    }
    if (url->path == "/v1" || url->path == "/v1/") {
        warnings.push_back(
            map.path("base_url") +
            ": it ends in /v1, and so the upstream is asked for /v1/v1/…; remove the path");
    }
    return upstream;
}

std::vector<UpstreamConfig> read_upstreams(const Map& root, std::vector<std::string>& warnings) {
    std::vector<UpstreamConfig> upstreams;
    const UpstreamConfig* takes_all = nullptr;
    std::size_t count = 0;
    const auto nodes = root.items("upstreams");
    upstreams.reserve(nodes.size());
    for (const YAML::Node& item : nodes) {
        const Map map(root.document(), item, "upstreams[" + std::to_string(count++) + "]",
                      {"name", "dialect", "base_url", "api_key_env", "models", "stream_usage",
                       "auth", "idempotency_key", "connect_timeout", "first_byte_timeout",
                       "idle_timeout", "ca_file"});
        UpstreamConfig upstream = read_upstream(map, warnings);
        for (const UpstreamConfig& other : upstreams) {
            if (other.name == upstream.name)
                map.refuse("name", ": two upstreams are called " + quoted(upstream.name));
        }
        if (takes_all != nullptr) {
            warnings.push_back("upstreams: " + upstream.name + " is never used, because " +
                               takes_all->name + " before it takes every model; put it first");
        }
        upstreams.push_back(std::move(upstream));
        const auto& models = upstreams.back().models;
        if (takes_all == nullptr && std::find(models.begin(), models.end(), "*") != models.end())
            takes_all = &upstreams.back();
    }
    if (upstreams.empty() && root.find("consumers") == nullptr)
        warnings.emplace_back("upstreams: none is named, so every call is answered 404");
    return upstreams;
}

constexpr milliseconds timeout_min{1};

void read_waits(const Map& map, RouteConfig& route) {
    map.read("join_timeout", route.join_timeout, timeout_min);
    map.read("finish_limit", route.finish_limit, timeout_min);
    map.read("heartbeat", route.heartbeat, milliseconds{0});
}

void read_route(const Map& map, bool chat, RouteConfig& route) {
    map.read("mode", route.mode,
             {{"off", Mode::off}, {"observe", Mode::observe}, {"on", Mode::on}});
    map.read("key", route.key, {{"optional", KeyRule::optional}, {"required", KeyRule::required}});
    if (chat && route.key == KeyRule::optional)
        map.refuse("key", ": /api/chat always needs an id; use required");
    map.read(
        "on_running", route.on_running,
        {{"join", OnRunning::join}, {"accept", OnRunning::accept}, {"reject", OnRunning::reject}});
    if (!chat && route.on_running == OnRunning::accept) {
        map.refuse("on_running",
                   ": 'accept' answers 202, which SDKs take for an empty success; use join or "
                   "reject here");
    }
    map.read("on_failed", route.on_failed,
             {{"rerun", OnFailed::rerun}, {"replay", OnFailed::replay}});
    map.read("on_unknown", route.on_unknown,
             {{"rerun", OnUnknown::rerun}, {"hold", OnUnknown::hold}}, {"probe"});
    map.read("on_disconnect", route.on_disconnect,
             {{"finish", OnDisconnect::finish}, {"cancel", OnDisconnect::cancel}}, {"grace"});
    map.read("model", route.model);
    if (!chat && map.find("model") != nullptr)
        map.refuse("model", " is for /api/chat only: elsewhere the body names the model");
    map.read_count<std::uint32_t>("max_paid_attempts", route.max_paid_attempts, 1'000'000);
    read_waits(map, route);
}

std::map<std::string, RouteConfig> read_routes(const Map& root) {
    RouteConfig defaults;
    if (const YAML::Node* node = root.find("gateway")) {
        const Map map(root.document(), *node, "gateway",
                      {"join_timeout", "finish_limit", "heartbeat"}, {"orphan_window"});
        read_waits(map, defaults);
    }
    static const std::string completions = "/v1/chat/completions";
    static const std::string chat = "/api/chat";
    std::map<std::string, RouteConfig> routes{{completions, defaults}, {chat, defaults}};
    routes[chat].key = KeyRule::required;
    routes[chat].on_running = OnRunning::accept;
    const YAML::Node* node = root.find("routes");
    if (node == nullptr) return routes;
    const Map map(root.document(), *node, "routes", {completions, chat},
                  {"/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"});
    for (const auto& [path, value] : map.entries()) {
        const Map route(root.document(), value, "routes." + path,
                        {"mode", "key", "on_running", "on_failed", "on_unknown", "on_disconnect",
                         "model", "max_paid_attempts", "join_timeout", "finish_limit", "heartbeat"},
                        {"record", "orphan_window"});
        read_route(route, path == chat, routes[path]);
    }
    return routes;
}

void check_addresses(const Map& root, const Config& config) {
    if (!config.admin.loopback()) {
        root.refuse("admin", ": " + quoted(config.admin.host) +
                                 " is not a loopback address; the admin address has no login in "
                                 "this version, so use 127.0.0.1 or [::1]");
    }
    if (config.listen.port != 0 && config.listen.port == config.admin.port &&
        config.listen.host == config.admin.host) {
        root.refuse("admin", ": listen and admin are the same address; give admin another port");
    }
    for (const auto& [name, other] :
         {std::pair("listen", config.listen), std::pair("admin", config.admin)}) {
        const bool same = config.peer.listen.port != 0 && other.port == config.peer.listen.port &&
                          other.host == config.peer.listen.host;
        if (same)
            root.refuse("peer", std::string(".listen: the same address as ") + name +
                                    "; give it another port, or 0 for any free one");
    }
    if (config.listen.loopback() || !config.clients.empty()) return;
    for (const UpstreamConfig& upstream : config.upstreams) {
        if (!upstream.has_api_key) continue;
        root.refuse("listen", ": " + quoted(config.listen.host) +
                                  " is not a loopback address, upstream " + quoted(upstream.name) +
                                  " has an API key of its own and there are no clients: anybody "
                                  "could spend its money. "
                                  "Name clients, or listen on 127.0.0.1");
    }
}

/// YAML::Load drops what follows the first document without a word, and YAML::LoadAll never returns
/// on some broken text.
bool goes_on_after_first_document(const std::string& text) {
    class Ignore final : public YAML::EventHandler {
        void OnDocumentStart(const YAML::Mark&) override {}
        void OnDocumentEnd() override {}
        void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
        void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
        void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                      const std::string&) override {}
        void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                             YAML::EmitterStyle::value) override {}
        void OnSequenceEnd() override {}
        void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                        YAML::EmitterStyle::value) override {}
        void OnMapEnd() override {}
    } ignore;
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    return parser.HandleNextDocument(ignore) && parser.HandleNextDocument(ignore);
}

Config read(const Document& document, const YAML::Node& node) {
    const Map root(
        document, node, "",
        {"listen", "admin", "threads", "store", "engine", "clients", "upstreams", "routes", "spool",
         "memory", "record", "allow_anonymous", "gateway", "drain_timeout", "peer", "consumers"},
        {"admin_tokens", "cors", "prices"});
    Config config;
    read_address(root, "listen", config.listen);
    read_address(root, "admin", config.admin);
    root.read_count<unsigned>("threads", config.threads, threads_max);
    config.store = read_store(root, config.warnings);
    config.peer = read_peer(root, config.store.shared(), config.warnings);
    config.engine = read_engine(root, config.store.shared(), config.warnings);
    config.clients = read_clients(root);
    config.upstreams = read_upstreams(root, config.warnings);
    config.routes = read_routes(root);
    if (config.store.shared()) config.spool_path = shared_spool_default;
    if (const YAML::Node* at = root.find("spool")) {
        const Map spool(document, *at, "spool", {"path"});
        spool.read("path", config.spool_path);
    }
    if (const YAML::Node* at = root.find("memory")) {
        const Map memory(document, *at, "memory", {"bodies", "hot_records"});
        memory.read_size("bodies", config.memory_bodies);
        memory.read_size("hot_records", config.memory_hot_records);
    }
    if (const YAML::Node* at = root.find("record")) {
        const Map record(document, *at, "record", {"max_bytes"}, {"body"});
        record.read_size("max_bytes", config.record_max_bytes);
    }
    config.consumers = read_consumers(root, config);
    root.read("allow_anonymous", config.allow_anonymous);
    root.read("drain_timeout", config.drain_timeout, milliseconds{0});
    check_addresses(root, config);
    if (config.store.kind == StoreKind::memory) {
        config.warnings.emplace_back("store.memory: records end with the process; for tests only");
    }
    return config;
}

}  // namespace

bool Address::loopback() const {
    if (host == "localhost" || host == "::1") return true;
    std::string_view rest = host;
    if (!rest.starts_with("127.")) return false;
    for (int part = 0; part < 4; ++part) {
        const std::size_t dot = rest.find('.');
        const std::string_view number = rest.substr(0, dot);
        if ((dot == std::string_view::npos) != (part == 3) || !all_digits(number) ||
            number.size() > 3)
            return false;
        rest.remove_prefix(dot == std::string_view::npos ? rest.size() : dot + 1);
    }
    return true;
}

bool Address::wildcard() const {
    const bool zeros = std::all_of(host.begin(), host.end(),
                                   [](char c) { return c == '0' || c == '.' || c == ':'; });
    return !host.empty() && zeros;
}

base::Result<Config> parse(std::string_view yaml, const std::string& file,
                           const Environment& environment) {
    const auto refused = [](std::string detail) {
        return base::Error{.code = base::ErrorCode::invalid_argument, .detail = std::move(detail)};
    };
    const Document document(file, environment);
    try {
        if (yaml.size() > config_max_bytes) document.refuse(1, "the file is larger than 1 MiB");
        int line = 1;
        for (const char c : yaml) {
            // yaml-cpp takes NUL and end-of-transmission for the end of the file and drops the rest
            // without a word.
            if (c == '\n') ++line;
            if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\r' && c != '\t') {
                document.refuse(
                    line, "the file holds a control character; it must be plain text (UTF-8)");
            }
        }
        const std::string text(yaml);
        const YAML::Node node = YAML::Load(text);
        if (goes_on_after_first_document(text)) {
            document.refuse(1,
                            "text follows after the end of the first YAML document ('---' or a "
                            "stray bracket); keep one document");
        }
        return read(document, node);
    } catch (const Refused& reason) {
        return refused(reason.message);
    } catch (const YAML::Exception& error) {
        return refused(file + ":" + std::to_string(error.mark.line + 1) +
                       ": not valid YAML: " + error.msg);
    }
}

base::Result<Config> load(const std::string& path) {
    const auto unreadable = [&] {
        return base::Error{.code = base::ErrorCode::io,
                           .detail = path +
                                     ": the configuration cannot be read; check that the file "
                                     "exists and its permissions"};
    };
    std::ifstream file(path, std::ios::binary);
    if (!file) return unreadable();
    std::string text(config_max_bytes + 1,
                     '\0');  // one more, so that parse() sees a file that is too large
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (file.bad()) return unreadable();
    text.resize(static_cast<std::size_t>(file.gcount()));
    return parse(text, path, [](const std::string& name) -> std::optional<std::string> {
        const char* value = std::getenv(name.c_str());
        if (value == nullptr) return std::nullopt;
        return value;
    });
}

bool glob_matches(std::string_view pattern, std::string_view model) {
    // Remembers the last star only: linear in practice, and never exponential.
    std::size_t at = 0;
    std::size_t in_pattern = 0;
    std::size_t star = std::string_view::npos;
    std::size_t resume = 0;
    while (at < model.size()) {
        if (in_pattern < pattern.size() && pattern[in_pattern] == '*') {
            star = in_pattern++;
            resume = at;
        } else if (in_pattern < pattern.size() && pattern[in_pattern] == model[at]) {
            ++in_pattern;
            ++at;
        } else if (star != std::string_view::npos) {
            in_pattern = star + 1;
            at = ++resume;
        } else {
            return false;
        }
    }
    return pattern.find_first_not_of('*', in_pattern) == std::string_view::npos;
}

}  // namespace semel::config
