// semel consumer: how the consumers of a running server stand, and what they are told.
#include <boost/json.hpp>
#include <cstdio>
#include <utility>

#include "cli/cli.hpp"
#include "cli/http_call.hpp"

namespace semel::cli {

namespace {

namespace json = boost::json;

int complain(int code, const std::string& why) {
    std::fprintf(stderr, "semel consumer: %s\n", why.c_str());
    return code;
}

std::string text_of(const json::value& value) {
    if (value.is_null()) return "-";
    return value.is_string() ? std::string(value.as_string()) : json::serialize(value);
}

/// In a path: what has a meaning there is written as %XX.
std::string encoded(const std::string& name) {
    static constexpr char digits[] = "0123456789ABCDEF";
    std::string out;
    for (const char c : name) {
        const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                           (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
        if (plain) {
            out += c;
        } else {
            out += '%';
            out += digits[static_cast<unsigned char>(c) >> 4];
            out += digits[static_cast<unsigned char>(c) & 15];
        }
    }
    return out;
}

/// What the running server answers, as JSON; nullopt: `code` says how it ended.
std::optional<json::value> asked(const ConsumerCommandOptions& options, const std::string& method,
                                 const std::string& path, const std::string& body, int& code) {
    std::string address = options.admin.empty() ? "127.0.0.1:8788" : options.admin;
    if (!options.config.empty()) {
        const auto config = config::load(options.config);
        if (!config) {
            code = complain(exit_usage, config.error().detail);
            return std::nullopt;
        }
        if (options.admin.empty()) address = authority(config->admin);
    }
    const auto answer = http_call("http://" + address, method, "/admin/consumers" + path, body);
    if (!answer) {
        code =
            complain(exit_failed, "no server answers on " + address + " (" + answer.error().detail +
                                      "): give the running one's file with --config, or its "
                                      "address with --admin");
        return std::nullopt;
    }
    boost::system::error_code failed;
    json::value parsed = json::parse(answer->body, failed);
    if (answer->status != 200) {
        std::string detail = "the server answered " + std::to_string(answer->status);
        if (!failed && parsed.is_object() && parsed.as_object().contains("detail"))
            detail = text_of(parsed.at("detail"));
        code = complain(answer->status == 404 ? exit_not_found : exit_failed, detail);
        return std::nullopt;
    }
    if (failed) {
        code = complain(exit_failed, address + " answers, but is no admin address of semel");
        return std::nullopt;
    }
    if (options.json) std::printf("%s\n", json::serialize(parsed).c_str());
    return parsed;
}

void print_one(const json::object& one) {
    for (const auto& [key, value] : one) {
        const std::string name(key.data(), key.size());
        if (value.is_object()) {
            for (const auto& [inner, fact] : value.as_object())
                std::printf("%-26s %s\n",
                            (name + "." + std::string(inner.data(), inner.size())).c_str(),
                            text_of(fact).c_str());
        } else if (value.is_array()) {
            for (const json::value& item : value.as_array()) {
                std::string line;
                if (item.is_object()) {
                    for (const auto& [inner, fact] : item.as_object())
                        line += (line.empty() ? "" : " ") +
                                std::string(inner.data(), inner.size()) + "=" + text_of(fact);
                } else {
                    line = text_of(item);
                }
                std::printf("%-26s %s\n", name.c_str(), line.c_str());
            }
        } else {
            std::printf("%-26s %s\n", name.c_str(), text_of(value).c_str());
        }
    }
}

/// "observed 12: first 9, duplicate 3": what happened, without where the ids were found.
std::string observed_in_words(const json::object& counts) {
    std::string out;
    for (const auto& [key, count] : counts) {
        const std::string name(key.data(), key.size());
        if (name.starts_with("id_from_") || (text_of(count) == "0" && name != "observed")) continue;
        const char* const between = out.empty() ? "" : out.find(": ") == out.npos ? ": " : ", ";
        out += between + name + " " + text_of(count);
    }
    return out;
}

void print_lag(const std::string& name, const json::value& lags) {
    for (const json::value& one : lags.at("partitions").as_array()) {
        std::printf("%-24s  %-32s  %9s  %12s  %12s  %8s\n", name.c_str(),
                    text_of(one.at("topic")).c_str(), text_of(one.at("partition")).c_str(),
                    text_of(one.at("committed")).c_str(), text_of(one.at("end")).c_str(),
                    text_of(one.at("lag")).c_str());
    }
}

}  // namespace

int consumer_list(const ConsumerCommandOptions& options) {
    int code = exit_ok;
    const bool one = !options.name.empty();
    const auto answer = asked(options, "GET", one ? "/" + encoded(options.name) : "", {}, code);
    if (!answer || options.json) return code;
    if (one) {
        print_one(answer->as_object());
        return code;
    }
    std::printf("%-24s  %-11s  %-9s  %7s  %7s  %7s  %10s  %s\n", "CONSUMER", "STRATEGY",
                "CONDITION", "IN HAND", "RUNNING", "WAITING", "PARTITIONS", "SOURCE");
    for (const json::value& each : answer->at("consumers").as_array()) {
        std::printf("%-24s  %-11s  %-9s  %7s  %7s  %7s  %10zu  %s\n",
                    text_of(each.at("name")).c_str(), text_of(each.at("strategy")).c_str(),
                    text_of(each.at("condition")).c_str(), text_of(each.at("in_hand")).c_str(),
                    text_of(each.at("running")).c_str(), text_of(each.at("waiting")).c_str(),
                    each.at("partitions").as_array().size(), text_of(each.at("source")).c_str());
        if (!each.at("reason").is_null())
            std::printf("    %s\n", text_of(each.at("reason")).c_str());
        if (text_of(each.at("strategy")) == "observe")
            std::printf("    %s\n", observed_in_words(each.at("counts").as_object()).c_str());
        for (const json::value& alarm : each.at("alarms").as_array())
            std::printf("    ! %s\n", text_of(alarm).c_str());
    }
    return code;
}

int consumer_lag(const ConsumerCommandOptions& options) {
    int code = exit_ok;
    std::vector<std::string> names{options.name};
    if (options.name.empty()) {
        ConsumerCommandOptions quiet = options;
        quiet.json = false;
        const auto all = asked(quiet, "GET", "", {}, code);
        if (!all) return code;
        names.clear();
        for (const json::value& each : all->at("consumers").as_array())
            names.push_back(text_of(each.at("name")));
    }
    bool headed = options.json;
    for (const std::string& name : names) {
        int its = exit_ok;
        const auto lags = asked(options, "GET", "/" + encoded(name) + "/lag", {}, its);
        if (!lags) code = its;
        if (lags && !std::exchange(headed, true))
            std::printf("%-24s  %-32s  %9s  %12s  %12s  %8s\n", "CONSUMER", "TOPIC", "PARTITION",
                        "COMMITTED", "END", "LAG");
        if (lags && !options.json) print_lag(name, *lags);
    }
    return code;
}

int consumer_tell(const ConsumerCommandOptions& options, const std::string& command) {
    int code = exit_ok;
    std::string body;
    if (!options.reason.empty()) body = json::serialize(json::object{{"reason", options.reason}});
    const auto answer =
        asked(options, "POST", "/" + encoded(options.name) + "/" + command, body, code);
    if (answer && !options.json) {
        const char* const became = command == "pause" ? "takes and starts nothing any more; what "
                                                        "runs ends, and it stays in its group"
                                   : command == "resume"
                                       ? "goes on"
                                       : "starts nothing any more, and leaves its "
                                         "group when nothing runs";
        std::fprintf(stderr, "semel consumer: %s %s\n", options.name.c_str(), became);
    }
    return code;
}

}  // namespace semel::cli
