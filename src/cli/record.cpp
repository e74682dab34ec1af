// semel record get | list | resolve | erase: through the admin address of the running server, else on the store itself.
#include <algorithm>
#include <boost/json.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>

#include "admin/records.hpp"
#include "cli/cli.hpp"
#include "cli/guarantees.hpp"
#include "cli/http_call.hpp"
#include "cli/intent_of.hpp"

namespace semel::cli {

namespace json = boost::json;

namespace {

int complain(int code, const std::string& what) {
    std::fprintf(stderr, "semel record: %s\n", what.c_str());
    return code;
}

std::string text_of(const json::value& value) {
    if (value.is_string()) return {value.as_string().data(), value.as_string().size()};
    if (value.is_null()) return "-";
    return json::serialize(value);
}

/// One answer to one question, wherever it comes from.
class Source {
  public:
    /// Finds the server, or opens the directory. A message in `problem` and the exit code if neither is to be had.
    static std::optional<Source> open(const RecordOptions& options, const Leaves& leaves, std::string& problem, int& code) {
        Source source;
        std::optional<config::Config> config;
        if (!options.config.empty()) {
            auto loaded = config::load(options.config);
            if (!loaded) {
                problem = loaded.error().detail;
                code = exit_usage;
                return std::nullopt;
            }
            config = std::move(*loaded);
        }
        if (config && uses_own_store(options.consumer, *config)) return open_store_of(*config, leaves, problem, code);
        source.base_url_ = "http://127.0.0.1:8788";
        if (config) source.base_url_ = "http://" + authority(config->admin);
        if (!options.admin.empty()) source.base_url_ = "http://" + options.admin;

        const auto alive = http_call(source.base_url_, "GET", "/healthz", {});
        if (alive) return source;
        code = exit_failed;
        if (!config || !options.admin.empty()) {
            problem = "no server answers at " + source.base_url_ + " (" + alive.error().detail +
                      "); start it, or give --config so that the store's directory can be opened instead";
            return std::nullopt;
        }
        if (config->store.kind == config::StoreKind::memory) {
            problem = "no server answers at " + source.base_url_ + ", and a memory store has nothing outside its server";
            return std::nullopt;
        }
        bool locked = false;
        auto opened = open_store_of(*config, leaves, problem, code, &locked);
        if (locked) {
            problem += "; that process does not answer on its admin address " + source.base_url_ +
                       ": name the right one with --admin, or end the process";
        }
        if (opened) std::fprintf(stderr, "semel record: no server runs; reading %s itself\n", store_in_words(config->store).c_str());
        return opened;
    }

    base::Result<admin::Reply> ask(const std::string& method, const std::string& path, const std::string& query,
                                   const std::string& body = {}) {
        if (records_) return records_->answer(method, path, query, body);
        auto answered = http_call(base_url_, method, query.empty() ? path : path + "?" + query, body);
        if (!answered) return answered.error();
        return admin::Reply{.status = answered->status, .content_type = answered->content_type, .body = std::move(answered->body)};
    }

    Source(Source&&) = default;
    Source& operator=(Source&&) = delete;
    ~Source() {
        if (store_) store_->stop();
    }

  private:
    Source() = default;

    /// Puts the store of its own that the consumer has, if it has one, in the place of the process's.
    static bool uses_own_store(const std::string& consumer, config::Config& config) {
        const auto found = std::ranges::find(config.consumers, consumer, &config::ConsumerConfig::name);
        if (found == config.consumers.end() || !found->store || *found->store == config.store) return false;
        config.store = *found->store;
        return true;
    }

    /// The store itself. `locked`: another process has it.
    static std::optional<Source> open_store_of(const config::Config& config, const Leaves& leaves, std::string& problem, int& code,
                                               bool* locked = nullptr) {
        code = exit_failed;
        auto opened = open_as_it_is(config, leaves);
        if (!opened) {
            problem = opened.error().detail;
            if (locked != nullptr) *locked = opened.error().code == base::ErrorCode::store_locked;
            return std::nullopt;
        }
        Source source;
        source.store_ = std::move(opened->store);
        auto secret = secret_of(config, *source.store_);
        if (!secret) {
            problem = secret.error().detail;
            return std::nullopt;
        }
        source.vault_ = std::make_unique<engine::Vault>(*secret, nullptr);
        source.records_ = std::make_unique<admin::Records>(
            *source.store_, intent_of(config, *secret),
            admin::Tenants{.tag_of = tenant_of(config, *secret), .vault = source.vault_.get()});
        return source;
    }

    std::string base_url_;
    std::unique_ptr<core::Store> store_;
    std::unique_ptr<engine::Vault> vault_;
    std::unique_ptr<admin::Records> records_;
};

/// Says why a reply is none of the good ones; the exit code.
int refused(const RecordOptions& options, const admin::Reply& reply) {
    if (options.json) std::fwrite(reply.body.data(), 1, reply.body.size(), stdout);
    boost::system::error_code failed;
    const json::value parsed = json::parse(reply.body, failed);
    std::string detail = "the server answered " + std::to_string(reply.status);
    if (!failed && parsed.is_object() && parsed.as_object().contains("detail")) detail = text_of(parsed.at("detail"));
    return complain(reply.status == 404 ? exit_not_found : exit_failed, detail);
}

/// The intent that is meant, by itself or by its client's name for it.
std::optional<std::string> find_intent(const RecordOptions& options, Source& source, int& code) {
    if (!options.intent.empty()) return options.intent;
    if (options.id.empty()) {
        code = complain(exit_usage, "name the record: its Semel-Intent, or --id with --client or --credential-env");
        return std::nullopt;
    }
    json::object name{{"operation", options.operation}, {"id", options.id}, {"user", options.user}, {"session", options.session}};
    name["client"] = options.client;
    if (!options.credential_env.empty()) {
        const char* credential = std::getenv(options.credential_env.c_str());
        if (credential == nullptr || *credential == '\0') {
            code = complain(exit_usage, "the environment variable " + options.credential_env + " is not set");
            return std::nullopt;
        }
        name["credential"] = credential;
    }
    const auto reply = source.ask("POST", "/admin/lookup", {}, json::serialize(name));
    if (!reply) {
        code = complain(exit_failed, reply.error().detail);
        return std::nullopt;
    }
    if (reply->status != 200) {
        code = refused(options, *reply);
        return std::nullopt;
    }
    return text_of(json::parse(reply->body).at("intent"));
}

/// One fact a line; an object's members under their own names.
void print_record(const json::object& record) {
    for (const auto& [key, value] : record) {
        const std::string name(key.data(), key.size());
        if (!value.is_object()) {
            std::printf("%-26s %s\n", name.c_str(), text_of(value).c_str());
            continue;
        }
        for (const auto& [inner, fact] : value.as_object()) {
            const std::string full = name + "." + std::string(inner.data(), inner.size());
            std::printf("%-26s %s\n", full.c_str(), text_of(fact).c_str());
        }
    }
}

const char* what_becomes(std::string_view decision) {
    if (decision == "completed") return "COMPLETED";
    return decision == "failed" ? "FAILED, and the next request under its id would call again"
                                : "FAILED with fresh budgets, and the next request under its id would call again";
}

/// What a file holds, by its first bytes.
std::string guess_content_type(std::string_view bytes) {
    const auto first = bytes.find_first_not_of(" \t\r\n");
    if (first != std::string_view::npos) bytes.remove_prefix(first);
    return bytes.starts_with('{') ? "application/json" : "text/event-stream";
}

}  // namespace

int record_get(const RecordOptions& options, const Leaves& leaves) {
    std::string problem;
    int code = exit_ok;
    auto source = Source::open(options, leaves, problem, code);
    if (!source) return complain(code, problem);
    const auto intent = find_intent(options, *source, code);
    if (!intent) return code;
    const auto reply = source->ask("GET", "/admin/records/" + *intent, options.body ? "body=1" : "");
    if (!reply) return complain(exit_failed, reply.error().detail);
    if (reply->status != 200) return refused(options, *reply);
    if (options.json || options.body) {
        std::fwrite(reply->body.data(), 1, reply->body.size(), stdout);
    } else {
        print_record(json::parse(reply->body).as_object());
    }
    return exit_ok;
}

int record_erase(const RecordOptions& options, const Leaves& leaves) {
    const int names = (options.client.empty() ? 0 : 1) + (options.intent.empty() ? 0 : 1) + (options.credential_env.empty() ? 0 : 1) +
                      (options.consumer.empty() ? 0 : 1);
    if (names != 1) return complain(exit_usage, "say whose data: one of --tenant, --tenant-of, --credential-env and --consumer");
    if (!options.yes && !options.dry_run) {
        return complain(exit_usage, "it cannot be undone: give --yes to do it, or --dry-run to see whom it means");
    }
    json::object wanted;
    if (!options.client.empty()) wanted["client"] = options.client;
    if (!options.intent.empty()) wanted["record"] = options.intent;
    if (!options.credential_env.empty()) {
        const char* credential = std::getenv(options.credential_env.c_str());
        if (credential == nullptr || *credential == '\0') {
            return complain(exit_usage, "the environment variable " + options.credential_env + " is not set");
        }
        wanted["credential"] = credential;
    }
    if (!options.consumer.empty()) wanted["consumer"] = options.consumer;
    std::string problem;
    int code = exit_ok;
    auto source = Source::open(options, leaves, problem, code);
    if (!source) return complain(code, problem);
    const auto reply = source->ask("POST", "/admin/tenants/erase", options.dry_run ? "dry_run=1" : "", json::serialize(wanted));
    if (!reply) return complain(exit_failed, reply.error().detail);
    if (reply->status != 200) return refused(options, *reply);
    if (options.json) {
        std::fwrite(reply->body.data(), 1, reply->body.size(), stdout);
        return exit_ok;
    }
    const json::value answered = json::parse(reply->body);
    const std::string tenant = text_of(answered.at("tenant"));
    if (options.dry_run) {
        std::printf("would erase tenant %s: all that is kept of its prompts, answers and conversations\n", tenant.c_str());
        return exit_ok;
    }
    std::printf("erased tenant %s: its data key is destroyed, and what was sealed under it cannot be read any more\n", tenant.c_str());
    std::printf("other gateways notice it within %s ms\n", text_of(answered.at("noticed_elsewhere_within_ms")).c_str());
    for (const json::value& part : answered.at("not_covered").as_array()) {
        std::printf("not covered: %s\n", text_of(part).c_str());
    }
    return exit_ok;
}

int record_list(const RecordOptions& options, const Leaves& leaves) {
    std::string problem;
    int code = exit_ok;
    auto source = Source::open(options, leaves, problem, code);
    if (!source) return complain(code, problem);
    std::string query = "limit=" + std::to_string(options.limit);
    if (!options.status.empty()) query += "&status=" + options.status;
    if (!options.cursor.empty()) query += "&cursor=" + options.cursor;
    const auto reply = source->ask("GET", "/admin/records", query);
    if (!reply) return complain(exit_failed, reply.error().detail);
    if (reply->status != 200) return refused(options, *reply);
    if (options.json) {
        std::fwrite(reply->body.data(), 1, reply->body.size(), stdout);
        return exit_ok;
    }
    const json::value page = json::parse(reply->body);
    std::printf("%-43s  %-10s  %7s  %-24s  %s\n", "INTENT", "STATUS", "ATTEMPT", "CREATED", "OPERATION");
    for (const json::value& record : page.at("records").as_array()) {
        std::printf("%-43s  %-10s  %7s  %-24s  %s\n", text_of(record.at("intent")).c_str(), text_of(record.at("status")).c_str(),
                    text_of(record.at("attempt")).c_str(), text_of(record.at("created")).c_str(),
                    text_of(record.at("operation")).c_str());
    }
    if (page.at("next").is_string()) {
        std::fprintf(stderr, "semel record: there are more: --cursor %s\n", text_of(page.at("next")).c_str());
    }
    return exit_ok;
}

int record_resolve(const RecordOptions& options, const Leaves& leaves) {
    const bool completes = options.decision == "completed";
    if (completes != !options.file.empty()) {
        return complain(exit_usage, completes ? "--as completed needs --file with the answer" : "--file belongs to --as completed");
    }
    json::object decision{{"decision", options.decision}};
    if (!options.reason.empty()) decision["reason"] = options.reason;
    if (completes) {
        std::ifstream file(options.file, std::ios::binary);
        std::ostringstream bytes;
        if (file) bytes << file.rdbuf();
        if (!file || bytes.str().empty()) return complain(exit_usage, options.file + ": cannot be read, or is empty");
        const std::string body = std::move(bytes).str();
        decision["content_type"] = options.content_type.empty() ? guess_content_type(body) : options.content_type;
        decision["body"] = body;
    }
    std::string problem;
    int code = exit_ok;
    auto source = Source::open(options, leaves, problem, code);
    if (!source) return complain(code, problem);
    const auto intent = find_intent(options, *source, code);
    if (!intent) return code;
    decision["token"] = options.token;
    if (options.token == 0) {
        const auto now = source->ask("GET", "/admin/records/" + *intent, "");
        if (!now) return complain(exit_failed, now.error().detail);
        if (now->status != 200) return refused(options, *now);
        decision["token"] = json::parse(now->body).at("token");
    }
    const auto reply = source->ask("POST", "/admin/records/" + *intent + "/resolve", options.dry_run ? "dry_run=1" : "",
                                   json::serialize(decision));
    if (!reply) return complain(exit_failed, reply.error().detail);
    if (reply->status != 200) return refused(options, *reply);
    if (options.json) {
        std::fwrite(reply->body.data(), 1, reply->body.size(), stdout);
        return exit_ok;
    }
    const json::value answered = json::parse(reply->body);
    if (options.dry_run) {
        std::fprintf(stderr, "semel record: dry run, nothing was changed; this record would become %s:\n",
                     what_becomes(options.decision));
        print_record(answered.at("record").as_object());
    } else {
        print_record(answered.as_object());
    }
    return exit_ok;
}

}  // namespace semel::cli
