#include "cli/guarantees.hpp"

#include <sys/stat.h>

#include <filesystem>
#include <optional>

namespace semel::cli {

namespace {

/// The device of a path, or of its nearest parent that exists.
std::optional<dev_t> device_of(std::filesystem::path path) {
    std::error_code ignored;
    path = std::filesystem::absolute(path, ignored);
    for (;;) {
        struct stat status {};
        if (stat(path.c_str(), &status) == 0) return status.st_dev;
        if (!path.has_relative_path()) return std::nullopt;
        path = path.parent_path();
    }
}

}  // namespace

std::string store_in_words(const config::StoreConfig& store) {
    switch (store.kind) {
        case config::StoreKind::memory: return "memory store";
        case config::StoreKind::rocksdb: return store.path;
        case config::StoreKind::redis: return store.redis.shown_url;
        case config::StoreKind::postgres: return store.postgres.shown_url;
        case config::StoreKind::mysql: return store.mysql.shown_url;
    }
    SEMEL_ASSERT(false, "every kind of store has its words");
    return {};
}

std::string durability_in_words(const config::StoreConfig& store) {
    if (store.kind == config::StoreKind::memory) {
        return "records live in memory only: when the process ends they are gone, and every retry after that is paid again";
    }
    if (store.shared()) {
        return "what survives depends on the settings of " + store_in_words(store) + ", which `doctor` asks";
    }
    if (store.durability == config::StoreDurability::sync) {
        return "a claim and a recorded answer are on the disk before anybody acts on them: they survive SIGKILL and a power cut";
    }
    return "a claim and a recorded answer survive SIGKILL; a power cut may take the last of them, and those are paid again";
}

std::string paid_once_in_words(const std::string& route, const config::RouteConfig& rules) {
    if (rules.mode == config::Mode::off) return route + ": off; nothing is protected";
    if (rules.mode == config::Mode::observe) return route + ": observe; duplicates are counted and still paid for";
    std::string words = route + ": a request with a key is paid for once, without conditions only if no owner dies or stalls past "
                                "its lease, the store loses no record and the upstream answers every call it accepted. ";
    if (rules.on_unknown == config::OnUnknown::rerun) {
        words += "Otherwise (on_unknown: rerun) the next request calls again, which is counted as a possible second payment.";
    } else {
        words += "Otherwise (on_unknown: hold) nobody calls again: the record waits as UNKNOWN for `semel record resolve`.";
    }
    if (rules.key == config::KeyRule::optional) words += " A request without a key passes through unprotected.";
    return words;
}

std::string spool_in_words(const config::Config& config) {
    if (config.spool_path.empty()) {
        return "an answer that the store cannot take at once waits in memory: it is lost if the process dies before the store is back";
    }
    const auto spool = device_of(config.spool_path);
    const auto store = device_of(config.store.path);
    if (config.store.kind == config::StoreKind::rocksdb && spool && store && *spool == *store) {
        return "the spool " + config.spool_path + " lies on the store's own disk: when that is full or broken, the spool is too; "
               "put it on another disk";
    }
    return "an answer that the store cannot take at once waits in " + config.spool_path + ", synced, until the store is back";
}

}  // namespace semel::cli
