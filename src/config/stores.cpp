#include "config/stores.hpp"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <span>
#include <utility>

namespace semel::config {

namespace {

constexpr unsigned wait_replicas_max = 16;
/// A claim that is not confirmed in this time is refused anyway.
constexpr milliseconds wait_timeout_max{2000};
/// It stands in every key.
constexpr std::size_t prefix_max_bytes = 64;
/// Each is a thread here and a process or thread of the database.
constexpr unsigned sql_connections_max = 64;
/// PostgreSQL cuts longer names off.
constexpr std::size_t schema_max_bytes = 63;

/// Where a URL's "user:password" begins and ends (both 0: it holds none). To the last '@', so that
/// a password whose '/' or '@' was not percent-encoded is not shown in part.
std::pair<std::size_t, std::size_t> credentials_in(std::string_view url) {
    const std::size_t scheme = url.find("://");
    const std::size_t at = url.rfind('@');
    if (scheme == std::string_view::npos || at == std::string_view::npos || at < scheme + 3 ||
        url[scheme + 3] == '/')  // unix:///path
        return {0, 0};
    return {scheme + 3, at};
}

void warn_of_password(const std::string& path, std::vector<std::string>& warnings) {
    warnings.push_back(path +
                       ": a password stands in the file; put it into an environment variable and "
                       "write ${NAME} here");
}

/// Only the scheme and what contradicts itself: the store's client reads the rest of the URL when
/// it is opened.
RedisConfig read_redis(const Map& map, std::vector<std::string>& warnings) {
    static constexpr std::string_view schemes[] = {"redis://", "rediss://", "unix://",
                                                   "redis-sentinel://", "rediss-sentinel://"};
    RedisConfig redis;
    map.read("url", redis.url);
    const auto* scheme = std::find_if(std::begin(schemes), std::end(schemes),
                                      [&](auto begin) { return redis.url.starts_with(begin); });
    if (scheme == std::end(schemes)) {
        // Not quoted: what is wrong about it may be that a password stands where the scheme should.
        map.refuse("url",
                   " must be a URL that begins with redis://, rediss:// (TLS), unix://, "
                   "redis-sentinel:// or rediss-sentinel://, such as redis://127.0.0.1:6379/0");
    }
    redis.shown_url = without_credentials(redis.url);
    const bool sentinel = scheme->find("sentinel") != std::string_view::npos;
    const bool tls = scheme->starts_with("rediss");

    map.read("cluster", redis.cluster);
    if (redis.cluster && (sentinel || *scheme == "unix://"))
        map.refuse("cluster",
                   ": a Cluster is reached by redis:// or rediss:// and the address of one of its "
                   "servers");
    map.read_count<unsigned>("wait_replicas", redis.wait_replicas, wait_replicas_max);
    map.read("wait_timeout", redis.wait_timeout, milliseconds{1}, wait_timeout_max);
    map.read("ca_file", redis.ca_file);
    if (!redis.ca_file.empty() && !tls)
        map.refuse("ca_file",
                   " is for TLS: begin the url with rediss:// or rediss-sentinel://, or remove it");
    map.read("sentinel_user", redis.sentinel_user);
    map.read("sentinel_password", redis.sentinel_password);
    for (const char* key : {"sentinel_user", "sentinel_password"}) {
        if (map.find(key) != nullptr && !sentinel)
            map.refuse(key, " is for the sentinels of a redis-sentinel:// url; remove it");
    }
    map.read("accept_eviction", redis.accept_eviction);
    map.read("prefix", redis.prefix);
    const bool plain = std::all_of(redis.prefix.begin(), redis.prefix.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '.' || c == '_' || c == '-' || c == ':';
    });
    if (redis.prefix.empty() || redis.prefix.size() > prefix_max_bytes || !plain)
        map.refuse("prefix", " must be 1 to 64 letters, digits, '.', '_', '-' or ':'");

    const std::string& written = map.find("url")->Scalar();
    const auto [begin, end] = credentials_in(written);
    const std::string_view credentials = std::string_view(written).substr(begin, end - begin);
    const bool in_the_file = credentials.find(':') != std::string_view::npos &&
                             credentials.find("${") == std::string_view::npos;
    const YAML::Node* password = map.find("sentinel_password");
    if (in_the_file || (password != nullptr && !password->Scalar().empty() &&
                        password->Scalar().find("${") == std::string::npos)) {
        warn_of_password(map.path(in_the_file ? "url" : "sentinel_password"), warnings);
    }
    return redis;
}

/// The members of a URL's query, as written.
std::vector<std::pair<std::string_view, std::string_view>> query_of(std::string_view url) {
    std::vector<std::pair<std::string_view, std::string_view>> members;
    std::size_t at = url.find('?');
    while (at != std::string_view::npos) {
        const std::size_t end = url.find('&', at + 1);
        const std::string_view member = url.substr(at + 1, end - at - 1);
        const std::size_t equals = member.find('=');
        members.emplace_back(member.substr(0, equals), equals == std::string_view::npos
                                                           ? std::string_view()
                                                           : member.substr(equals + 1));
        at = end;
    }
    return members;
}

/// A database's URL without its user, and of its query only what `harmless` names. Where it cannot
/// be told which '@' ends the password, nothing but the scheme.
std::string shown(std::string_view url, std::span<const std::string_view> harmless) {
    const std::size_t host = url.find("://") + 3;
    const std::size_t query = url.find('?');
    const std::size_t at = url.rfind('@');
    std::string out(url.substr(0, host));
    if (at != std::string_view::npos && at > query) return out + "…";
    const std::size_t begin = at == std::string_view::npos ? host : at + 1;
    out += url.substr(begin, query - begin);
    char separator = '?';
    for (const auto& [key, value] : query_of(url)) {
        if (std::find(harmless.begin(), harmless.end(), key) == harmless.end()) continue;
        out.append(1, separator).append(key).append("=").append(value);
        separator = '&';
    }
    return out;
}

/// Whether the URL as it stands in the file holds a password itself, and not the name of a
/// variable.
bool holds_password(std::string_view written) {
    const auto [begin, end] = credentials_in(written.substr(0, written.find('?')));
    const std::string_view credentials = written.substr(begin, end - begin);
    if (credentials.find(':') != std::string_view::npos &&
        credentials.find("${") == std::string_view::npos)
        return true;
    for (const auto& [key, value] : query_of(written)) {
        if ((key == "password" || key == "sslpassword") && !value.empty() &&
            value.find("${") == std::string_view::npos)
            return true;
    }
    return false;
}

/// The keys that both databases have. Of the URL only the scheme is checked here: the database's
/// own client reads the rest when the store is opened.
template <class Database>
Database read_database(const Map& map, std::span<const std::string_view> schemes,
                       std::span<const std::string_view> harmless, std::string_view example,
                       std::vector<std::string>& warnings) {
    Database database;
    map.read("url", database.url);
    const bool known = std::any_of(schemes.begin(), schemes.end(), [&](std::string_view scheme) {
        return database.url.starts_with(scheme);
    });
    if (!known) {
        // Not quoted: what is wrong about it may be that a password stands where the scheme should.
        map.refuse("url", " must be a URL that begins with " + std::string(schemes[0]) +
                              ", such as " + std::string(example));
    }
    const bool visible = std::all_of(database.url.begin(), database.url.end(), [](char c) {
        return static_cast<unsigned char>(c) > 0x20 && c != 0x7F;
    });
    if (!visible)
        map.refuse("url",
                   " holds a blank, a line end or a control character; percent-encode it (%20 is a "
                   "blank), or see whether a variable's value ends in one");
    database.shown_url = shown(database.url, harmless);
    map.read_count<unsigned>("connections", database.connections, sql_connections_max);
    if (database.connections == 0) map.refuse("connections", ": at least 1 is needed");
    map.read("migrate", database.migrate);
    if (holds_password(map.find("url")->Scalar())) warn_of_password(map.path("url"), warnings);
    return database;
}

}  // namespace

PostgresConfig read_postgres(const Map& map, std::vector<std::string>& warnings) {
    static constexpr std::string_view schemes[] = {"postgresql://", "postgres://"};
    static constexpr std::string_view harmless[] = {"host",   "hostaddr", "port",
                                                    "dbname", "sslmode",  "target_session_attrs"};
    auto postgres = read_database<PostgresConfig>(
        map, schemes, harmless, "postgresql://semel:${PASSWORD}@127.0.0.1:5432/semel", warnings);
    map.read("schema", postgres.schema);
    const std::string_view schema = postgres.schema;
    const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; };
    const bool plain = !schema.empty() && schema.size() <= schema_max_bytes && letter(schema[0]) &&
                       std::all_of(schema.begin(), schema.end(),
                                   [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
    if (map.find("schema") != nullptr && (!plain || schema.starts_with("pg_"))) {
        map.refuse("schema",
                   " must be 1 to 63 of a-z, 0-9 and '_', and begin neither with a digit nor with "
                   "pg_, which PostgreSQL keeps for itself");
    }
    return postgres;
}

MysqlConfig read_mysql(const Map& map, std::vector<std::string>& warnings) {
    static constexpr std::string_view schemes[] = {"mysql://"};
    static constexpr std::string_view harmless[] = {"socket", "tls", "ca_file"};
    return read_database<MysqlConfig>(map, schemes, harmless,
                                      "mysql://semel:${PASSWORD}@127.0.0.1:3306/semel", warnings);
}

std::string without_credentials(const std::string& url) {
    std::string out = url;
    const auto [from, to] = credentials_in(url);
    if (to > 0) out.erase(from, to + 1 - from);
    return out;
}

StoreConfig read_store(const Map& root, std::vector<std::string>& warnings) {
    StoreConfig store;
    const YAML::Node* node = root.find("store");
    if (node == nullptr) return store;
    const Map kinds(root.document(), *node, root.path("store"),
                    {"memory", "rocksdb", "redis", "postgres", "mysql"});
    if (kinds.entries().size() != 1) {
        root.refuse("store",
                    " must name exactly one of memory, rocksdb, redis, postgres, mysql, such as "
                    "rocksdb: { path: ./semel-data }");
    }
    if (const YAML::Node* memory = kinds.find("memory")) {
        const Map none(root.document(), *memory, kinds.path("memory"), {});
        store.kind = StoreKind::memory;
        return store;
    }
    if (const YAML::Node* redis = kinds.find("redis")) {
        store.kind = StoreKind::redis;
        const Map map(root.document(), *redis, kinds.path("redis"),
                      {"url", "cluster", "wait_replicas", "wait_timeout", "ca_file",
                       "sentinel_user", "sentinel_password", "accept_eviction", "prefix"});
        store.redis = read_redis(map, warnings);
        return store;
    }
    if (const YAML::Node* postgres = kinds.find("postgres")) {
        store.kind = StoreKind::postgres;
        const Map map(root.document(), *postgres, kinds.path("postgres"), postgres_keys);
        store.postgres = read_postgres(map, warnings);
        return store;
    }
    if (const YAML::Node* mysql = kinds.find("mysql")) {
        store.kind = StoreKind::mysql;
        const Map map(root.document(), *mysql, kinds.path("mysql"), mysql_keys);
        store.mysql = read_mysql(map, warnings);
        return store;
    }
    const Map rocksdb(root.document(), *kinds.find("rocksdb"), kinds.path("rocksdb"),
                      {"path", "durability"});
    rocksdb.read("path", store.path);
    if (store.path.empty()) rocksdb.refuse("path", " must name a directory");
    rocksdb.read("durability", store.durability,
                 {{"sync", StoreDurability::sync}, {"async", StoreDurability::async}});
    return store;
}

bool StoreConfig::has_tables() const {
    return kind == StoreKind::postgres || kind == StoreKind::mysql;
}

bool StoreConfig::migrates() const {
    return kind == StoreKind::postgres ? postgres.migrate
                                       : kind == StoreKind::mysql && mysql.migrate;
}

bool StoreConfig::shared() const { return kind == StoreKind::redis || has_tables(); }

}  // namespace semel::config
