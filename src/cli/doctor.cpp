// semel doctor: what a configuration guarantees, and what is wrong with it on this machine.
#include <boost/json.hpp>
#include <cstdio>
#include <filesystem>

#include "cli/cli.hpp"
#include "cli/consumer_outlook.hpp"
#include "cli/guarantees.hpp"
#include "cli/http_call.hpp"
#include "cli/own_stores.hpp"
#include "cli/sockets.hpp"

namespace semel::cli {

namespace {

namespace json = boost::json;

/// Fewer open files than this run out under a few thousand streams (each takes two).
constexpr std::uint64_t open_files_wanted = 16 * 1024;

enum class Grade { good, note, bad };

struct Finding {
    Grade grade = Grade::good;
    std::string about;
    std::string text;
};

class Findings {
  public:
    void add(Grade grade, std::string about, std::string text) {
        all_.push_back({grade, std::move(about), std::move(text)});
    }
    [[nodiscard]] bool any_bad() const {
        for (const Finding& one : all_) {
            if (one.grade == Grade::bad) return true;
        }
        return false;
    }
    void print(bool as_json) const {
        json::array list;
        for (const Finding& one : all_) {
            const char* grade = one.grade == Grade::good   ? "ok"
                                : one.grade == Grade::note ? "note"
                                                           : "wrong";
            if (as_json) {
                list.push_back(
                    json::object{{"grade", grade}, {"about", one.about}, {"text", one.text}});
            } else {
                std::printf("%-5s  %-10s  %s\n", grade, one.about.c_str(), one.text.c_str());
            }
        }
        if (as_json)
            std::printf(
                "%s\n",
                json::serialize(json::object{{"ok", !any_bad()}, {"findings", list}}).c_str());
    }

  private:
    std::vector<Finding> all_;
};

/// True if a semel answers on the configured admin address: then its ports and its directory are in
/// use rightly.
bool server_runs(const config::Config& config) {
    return http_call("http://" + authority(config.admin), "GET", "/healthz", {}).has_value();
}

void look_at_ports(const config::Config& config, bool running, Findings& findings) {
    if (running) {
        findings.add(Grade::good, "ports",
                     "a server runs and answers on " + authority(config.admin));
        return;
    }
    for (const config::Address* address : {&config.listen, &config.admin}) {
        const auto free = can_listen(*address);
        if (free) {
            findings.add(Grade::good, "ports", authority(*address) + " is free");
        } else {
            findings.add(Grade::bad, "ports", free.error().detail);
        }
    }
}

void look_at_spool(const config::Config& config, Findings& findings) {
    const bool apart =
        !config.spool_path.empty() && spool_in_words(config).find("own disk") == std::string::npos;
    findings.add(apart ? Grade::good : Grade::note, "spool", spool_in_words(config));
}

void look_at_directory(const config::Config& config, bool running, const Leaves& leaves,
                       Findings& findings) {
    findings.add(Grade::good, "store", durability_in_words(config.store));
    const std::string& path = config.store.path;
    if (running) {
        findings.add(Grade::good, "store",
                     path + " is in use by the running server; its state is on /readyz");
        return;
    }
    std::error_code failed;
    if (!std::filesystem::exists(path, failed)) {
        findings.add(Grade::good, "store", path + " does not exist yet; `serve` makes it");
        return;
    }
    auto opened = leaves.open_store(config, false);
    if (!opened) {
        findings.add(Grade::bad, "store", opened.error().detail);
        return;
    }
    findings.add(Grade::good, "store", path + " can be opened");
    for (const std::string& notice : opened->notices) findings.add(Grade::note, "store", notice);
    if (opened->clock_kept) {
        findings.add(Grade::bad, "clock",
                     "the machine's clock and the store's differ by " +
                         std::to_string(opened->wall_ahead_us / 1'000'000) +
                         " s and the store goes on with its own; if the machine's is right, run "
                         "`semel serve --accept-clock` once");
    }
    const auto space = std::filesystem::space(path, failed);
    if (!failed && space.available < (256ull << 20)) {
        findings.add(
            Grade::bad, "store",
            path +
                ": less than 256 MiB are free; nothing new can be claimed when the disk is full");
    }
    opened->store->stop();
}

/// True if the tables can be used as they are. Nothing is changed: `serve` or `store migrate` does
/// that.
bool look_at_tables(const config::Config& config, const std::string& file, const Leaves& leaves,
                    Findings& findings) {
    const auto plan = leaves.plan_store(config);
    if (!plan) {
        findings.add(Grade::bad, "store", plan.error().detail);
        return false;
    }
    if (plan->empty()) return true;
    const std::string command = "`semel store migrate --config " + file + "`";
    const std::string state =
        store_in_words(config.store) + " can be reached, but its tables are missing or old: ";
    if (config.store.migrates()) {
        findings.add(Grade::note, "store",
                     state + "`serve` will make or change them (" + std::to_string(plan->size()) +
                         " statement(s), which " + command +
                         " runs now and shows first). What the server promises is said here once "
                         "they are there");
    } else {
        findings.add(
            Grade::bad, "store",
            state + "`serve` refuses to start (`migrate: false`) until you have run " + command);
    }
    return false;
}

/// A store that others share can be asked whether or not a server runs here; its own settings say
/// what it promises.
void look_at_shared_store(const config::Config& config, const std::string& file,
                          const Leaves& leaves, Findings& findings) {
    if (config.store.has_tables() && !look_at_tables(config, file, leaves, findings)) return;
    auto opened = open_as_it_is(config, leaves);
    if (!opened) {
        findings.add(Grade::bad, "store", opened.error().detail);
        return;
    }
    findings.add(
        Grade::good, "store",
        store_in_words(config.store) + " can be used: " + opened->server +
            (opened->pooled ? ", through a pooler that hands connections out per transaction"
                            : ""));
    findings.add(Grade::good, "store", opened->store->durability().summary);
    for (const std::string& wrong : opened->wrong) findings.add(Grade::bad, "store", wrong);
    for (const std::string& notice : opened->notices) findings.add(Grade::note, "store", notice);
    opened->store->stop();
}

void look_at_one_store(const config::Config& config, const std::string& file, bool running,
                       const Leaves& leaves, Findings& findings) {
    switch (config.store.kind) {
        case config::StoreKind::memory:
            findings.add(Grade::note, "store", durability_in_words(config.store));
            break;
        case config::StoreKind::rocksdb:
            look_at_directory(config, running, leaves, findings);
            break;
        case config::StoreKind::redis:
        case config::StoreKind::postgres:
        case config::StoreKind::mysql:
            look_at_shared_store(config, file, leaves, findings);
            break;
    }
}

void look_at_store(const config::Config& config, const std::string& file, bool running,
                   const Leaves& leaves, Findings& findings) {
    look_at_one_store(config, file, running, leaves, findings);
    look_at_spool(config, findings);
    for (const config::Config& own : configs_of_own_stores(config))
        look_at_one_store(own, file, running, leaves, findings);
}

void look_at_callers(const config::Config& config, Findings& findings) {
    bool keeps_key = false;
    for (const auto& upstream : config.upstreams) keeps_key = keeps_key || upstream.has_api_key;
    if (!config.clients.empty()) {
        std::string names;
        for (const auto& client : config.clients)
            names += (names.empty() ? "" : ", ") + client.name;
        findings.add(Grade::good, "clients", "these may call, each its own tenant: " + names);
    } else if (keeps_key) {
        findings.add(Grade::note, "clients",
                     "no clients: are named and an upstream's key is kept here: whoever reaches " +
                         authority(config.listen) + " on this machine spends it");
    } else {
        findings.add(
            Grade::good, "clients",
            "no clients: are named: each caller's own credential is its tenant and goes upstream");
    }
    if (config.allow_anonymous) {
        findings.add(Grade::note, "clients",
                     "allow_anonymous: callers without a credential share one tenant and each "
                     "other's answers");
    }
    if (!config.admin.loopback()) {
        findings.add(Grade::note, "admin",
                     authority(config.admin) +
                         " is no loopback address: health and metrics answer there, "
                         "the admin API refuses");
    }
}

void look_at_upstreams(const config::Config& config, Findings& findings) {
    if (config.upstreams.empty() && config.consumers.empty())
        findings.add(Grade::bad, "upstream",
                     "no upstreams: are configured; every call is answered 404");
    for (const auto& upstream : config.upstreams) {
        const std::string who = upstream.name + " (" + upstream.base_url + ")";
        const auto connected = can_connect(upstream.base_url, upstream.ca_file);
        if (connected) {
            findings.add(Grade::good, "upstream", who + " can be reached; no paid call was made");
        } else {
            findings.add(Grade::bad, "upstream",
                         who + " cannot be reached: " + connected.error().detail);
        }
    }
}

void look_at_consumers(const config::Config& config, const std::string& file, const Leaves& leaves,
                       Findings& findings) {
    for (const auto& consumer : config.consumers) {
        const auto add = [&](Grade grade, const std::string& text) {
            findings.add(grade, "consumer", consumer.name + ": " + text);
        };
        add(Grade::good,
            "strategy " + strategy_in_words(consumer) + ": " + promise_in_words(consumer, config));
        const Outlook outlook = look_at_consumer(consumer, file, leaves, false);
        if (!consumer.observe)
            add(Grade::good, runs_in_words(consumer.retry) + "; done ids stay known for " +
                                 config::duration_word(outlook.retention) + ", dead ones for " +
                                 config::duration_word(consumer.retention_dead));
        for (const std::string& text : outlook.good) add(Grade::good, text);
        for (const std::string& text : outlook.notes) add(Grade::note, text);
        for (const std::string& text : outlook.wrong) add(Grade::bad, text);
        for (const std::string& text : outlook.away) add(Grade::bad, text);
    }
}

}  // namespace

int doctor(const DoctorOptions& options, const Leaves& leaves) {
    const auto config = config::load(options.config);
    if (!config) {
        std::fprintf(stderr, "semel doctor: %s\n", config.error().detail.c_str());
        return exit_usage;
    }
    if (const auto checked = check_consumers(*config, options.config, leaves); !checked) {
        std::fprintf(stderr, "semel doctor: %s\n", checked.error().detail.c_str());
        return exit_usage;
    }
    Findings findings;
    findings.add(Grade::good, "config", options.config + " is valid");
    for (const std::string& warning : config->warnings)
        findings.add(Grade::note, "config", warning);
    const bool running = server_runs(*config);
    look_at_store(*config, options.config, running, leaves, findings);
    for (const auto& [route, rules] : config->routes)
        findings.add(Grade::good, "paid once", paid_once_in_words(route, rules));
    look_at_ports(*config, running, findings);
    look_at_callers(*config, findings);
    look_at_upstreams(*config, findings);
    look_at_consumers(*config, options.config, leaves, findings);
    const std::uint64_t files = raise_open_files_limit();
    findings.add(
        files >= open_files_wanted ? Grade::good : Grade::note, "files",
        "at most " + std::to_string(files) + " open files" +
            (files >= open_files_wanted ? ""
                                        : ": raise it (LimitNOFILE=, ulimit -n) for many streams"));
    findings.print(options.json);
    return findings.any_bad() ? exit_failed : exit_ok;
}

}  // namespace semel::cli
