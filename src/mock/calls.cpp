#include "mock/calls.hpp"

#include "base/json_scan.hpp"

namespace semel::mock {

namespace {

void append_headers(std::string& out, std::string_view lines) {
    out += '{';
    bool first = true;
    while (!lines.empty()) {
        const std::size_t end = lines.find('\n');
        const std::string_view line = lines.substr(0, end);
        lines.remove_prefix(end + 1);
        const std::size_t colon = line.find(':');
        std::string name(line.substr(0, colon));
        for (char& c : name) {
            if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
        }
        if (!first) out += ',';
        first = false;
        base::append_json_string(out, name);
        out += ':';
        base::append_json_string(out, line.substr(colon + 1));
    }
    out += '}';
}

}  // namespace

std::uint64_t Calls::add(const http::RequestHead& head, std::string_view model,
                         std::string_view body, const base::Digest& digest) {
    body = body.substr(0, kept_body_max);
    std::string key(digest.view());
    key += head.path;
    const std::lock_guard lock(mutex_);
    const std::uint64_t number = ++total_;
    const auto found = by_body_.find(key);
    if (found == by_body_.end() &&
        (entries_.size() >= kept_bodies_max || kept_bytes_ + body.size() > kept_bytes_max)) {
        ++not_kept_;
        return number;
    }
    if (found == by_body_.end()) {
        by_body_.emplace(std::move(key), entries_.size());
        kept_bytes_ += body.size();
        entries_.push_back(
            {std::string(head.path), std::string(model), std::string(body), digest, {}, 0, {}});
    }
    Entry& entry = found == by_body_.end() ? entries_.back() : entries_[found->second];
    ++entry.count;
    if (entry.numbers.size() < kept_numbers_max) entry.numbers.push_back(number);
    entry.headers.clear();
    for (const http::Header& header : head.headers) {
        entry.headers.append(header.name).append(":").append(header.value).append("\n");
    }
    return number;
}

std::uint64_t Calls::count_of_model(std::string_view model) {
    const std::lock_guard lock(mutex_);
    auto found = by_model_.find(model);
    if (found == by_model_.end()) found = by_model_.emplace(model, 0).first;
    return ++found->second;
}

bool Calls::matches(const Entry& entry, std::string_view contains, std::string_view model) {
    return (model.empty() || entry.model == model) &&
           entry.body.find(contains) != std::string::npos;
}

std::uint64_t Calls::count(std::string_view contains, std::string_view model) const {
    const std::lock_guard lock(mutex_);
    if (contains.empty() && model.empty()) return total_;
    std::uint64_t sum = 0;
    for (const Entry& entry : entries_) {
        if (matches(entry, contains, model)) sum += entry.count;
    }
    return sum;
}

std::string Calls::json(std::string_view contains, std::string_view model) const {
    std::string out = "{\"total\":" + std::to_string(count(contains, model));
    const std::lock_guard lock(mutex_);
    out += ",\"not_kept\":" + std::to_string(not_kept_) + ",\"by_body\":[";
    bool first = true;
    for (const Entry& entry : entries_) {
        if (!matches(entry, contains, model)) continue;
        if (!first) out += ',';
        first = false;
        out += "{\"sha256\":\"" + base::hex(entry.digest.view()) +
               "\",\"count\":" + std::to_string(entry.count) + ",\"model\":";
        base::append_json_string(out, entry.model);
        out += ",\"path\":";
        base::append_json_string(out, entry.path);
        out += ",\"numbers\":[";
        for (std::size_t i = 0; i < entry.numbers.size(); ++i) {
            if (i > 0) out += ',';
            out += std::to_string(entry.numbers[i]);
        }
        out += "],\"headers\":";
        append_headers(out, entry.headers);
        out += '}';
    }
    return out + "]}";
}

void Calls::reset() {
    const std::lock_guard lock(mutex_);
    total_ = not_kept_ = 0;
    kept_bytes_ = 0;
    entries_.clear();
    by_body_.clear();
    by_model_.clear();
}

}  // namespace semel::mock
