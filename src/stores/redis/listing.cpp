#include "stores/redis/listing.hpp"

#include <algorithm>
#include <charconv>
#include <future>
#include <set>

#include "stores/redis/operations.hpp"
#include "stores/redis/scripts.hpp"

namespace semel::stores::redis {

namespace {

using namespace core;

/// Buckets whose sets are asked for at once.
constexpr std::uint16_t buckets_at_once = 64;
/// Records read at once; each may carry an inline body.
constexpr std::size_t records_at_once = 32;
/// SCAN's COUNT. The same for every call, so that a cursor gives the same keys when it is asked
/// again.
constexpr std::string_view scan_count = "100";
/// Keys that one purge looks at, at most about.
constexpr std::size_t purge_looks_at = 2000;

base::Error foreign_cursor() {
    return {
        .code = base::ErrorCode::invalid_argument,
        .detail =
            "redis: the scan's cursor is not one of this store's; start again without a cursor"};
}

bool matches(const ScanFilter& filter, const Record& record, StoreTime at) {
    if (record.expires.us != 0 && record.expires <= at) return false;
    if (filter.undecided_only && !undecided(record)) return false;
    if (filter.dead_leases_only && (record.status != Status::processing || record.lease_end > at))
        return false;
    return filter.status == 0 || filter.status == static_cast<std::uint8_t>(record.status);
}

Command plain(std::uint16_t slot, const std::vector<std::string>& words, bool writes) {
    Command command;
    command.slot = slot;
    command.writes = writes;
    command.repeatable = true;
    for (const std::string& word : words) append_argument(command.wire, word);
    command.arguments = static_cast<std::uint32_t>(words.size());
    return command;
}

Command purge_command(std::uint16_t slot, const std::vector<std::string>& keys,
                      const std::vector<std::string>& arguments) {
    std::vector<std::string> words{std::to_string(keys.size())};
    words.insert(words.end(), keys.begin(), keys.end());
    words.insert(words.end(), arguments.begin(), arguments.end());
    Command command = plain(slot, words, true);
    command.script = &scripts().purge;
    return command;
}

base::Error failed(const NoReply& none) {
    return {.code = none.full ? base::ErrorCode::store_full : base::ErrorCode::store_unavailable,
            .applied = none.applied,
            .retry_after = std::chrono::seconds{1},
            .detail = "redis: " + none.detail};
}

/// A number in front of `text`, and what comes behind the ':' after it.
bool split_number(std::string_view text, std::size_t& number, std::string_view& rest) {
    const auto colon = text.find(':');
    if (colon == std::string_view::npos) return false;
    const auto read = std::from_chars(text.data(), text.data() + colon, number);
    rest = text.substr(colon + 1);
    return read.ec == std::errc{} && read.ptr == text.data() + colon;
}

}  // namespace

/// A page while it fills.
struct Listing::Page {
    const ScanFilter& filter;
    std::size_t limit;
    ScanPage out;
    std::string last;       ///< Cursor that goes on behind the last record.
    bool complete = false;  ///< A record more was found: `out.next` says where.
};

Listing::Listing(Client& client, const Names& names, std::function<StoreTime()> time)
    : client_(client), names_(names), time_(std::move(time)) {}

std::string Listing::time_text() const {
    return time_ ? std::to_string(time_().us) : std::string{};
}

base::Result<std::vector<Reply>> Listing::call(std::vector<Command> commands) {
    std::vector<Reply> replies;
    if (commands.empty()) return replies;
    std::promise<std::vector<Answer>> promise;
    client_.submit(std::move(commands), [&promise](std::vector<Answer> answers) {
        promise.set_value(std::move(answers));
    });
    for (Answer& answer : promise.get_future().get()) {
        if (const auto* none = std::get_if<NoReply>(&answer)) return failed(*none);
        replies.push_back(std::move(std::get<Reply>(answer)));
    }
    return replies;
}

base::Result<StoreTime> Listing::time_of(std::uint16_t slot) {
    if (time_) return time_();
    auto reply = call({plain(slot, {"TIME"}, false)});
    if (!reply) return reply.error();
    return time_in(reply->front());
}

/// Reads the records of these names and puts those that match on the page. True: the page is
/// complete. `cursor_at(i)`: where to go on so that name i comes first.
base::Result<bool> Listing::take(Page& page, const std::vector<std::string>& names_found,
                                 const std::function<std::string(std::size_t)>& cursor_at) {
    for (std::size_t from = 0; from < names_found.size(); from += records_at_once) {
        const std::size_t to = std::min(names_found.size(), from + records_at_once);
        std::vector<Command> commands;
        std::vector<Names::Parsed> parsed;
        for (std::size_t i = from; i < to; ++i) {
            parsed.push_back(names_.parse(names_found[i]));
            commands.push_back(get_record(parsed.back().key, names_));
        }
        auto replies = call(std::move(commands));
        if (!replies) return replies.error();
        for (std::size_t i = from; i < to; ++i) {
            auto record = record_of((*replies)[i - from]);
            if (!record) return record.error();
            const StoredKey& key = parsed[i - from].key;
            if (!*record) {
                // Gone without its script: evicted, or deleted by hand.
                if (page.filter.undecided_only || page.filter.dead_leases_only) {
                    const std::uint16_t bucket = bucket_of(key);
                    auto forgotten = call({purge_command(names_.slot(bucket),
                                                         {names_.undecided(bucket), names_found[i]},
                                                         {time_text(), "u"})});
                    if (!forgotten) return forgotten.error();
                }
                continue;
            }
            if (!matches(page.filter, **record, page.out.at)) continue;
            if (page.out.records.size() == page.limit) {
                page.out.next = cursor_at(i);
                return true;
            }
            auto shown = std::make_shared<Record>(**record);
            if (shown->answer) shown->answer->body = nullptr;
            page.out.records.emplace_back(key, std::move(shown));
        }
    }
    return false;
}

base::Result<ScanPage> Listing::scan(const ScanFilter& filter, const std::string& cursor,
                                     std::size_t limit) {
    Page page{.filter = filter, .limit = std::max<std::size_t>(limit, 1)};
    const auto at = time_of(0);
    if (!at) return at.error();
    page.out.at = *at;
    const bool always_undecided = filter.status == static_cast<std::uint8_t>(Status::processing) ||
                                  filter.status == static_cast<std::uint8_t>(Status::unknown);
    const bool by_sets = filter.undecided_only || filter.dead_leases_only || always_undecided;
    const auto scanned = by_sets ? scan_undecided(page, cursor) : scan_all(page, cursor);
    if (!scanned) return scanned.error();
    return std::move(page.out);
}

/// Cursor: u, bucket, ':', the first name that is still to come.
base::Result<void> Listing::scan_undecided(Page& page, const std::string& cursor) {
    std::size_t first = 0;
    std::string_view from_name;
    if (!cursor.empty() &&
        (cursor[0] != 'u' || !split_number(std::string_view(cursor).substr(1), first, from_name)))
        return foreign_cursor();
    for (std::size_t group = first; group < key_buckets; group += buckets_at_once) {
        const std::size_t end = std::min<std::size_t>(key_buckets, group + buckets_at_once);
        std::vector<Command> commands;
        for (std::size_t bucket = group; bucket < end; ++bucket) {
            const auto narrow = static_cast<std::uint16_t>(bucket);
            const std::string set = names_.undecided(narrow);
            const std::string until =
                page.filter.dead_leases_only ? std::to_string(page.out.at.us) : "+inf";
            commands.push_back(
                plain(names_.slot(narrow), {"ZRANGEBYSCORE", set, "-inf", until}, false));
        }
        auto replies = call(std::move(commands));
        if (!replies) return replies.error();
        for (std::size_t bucket = group; bucket < end; ++bucket) {
            std::vector<std::string> found;
            for (Reply& member : (*replies)[bucket - group].elements) {
                const bool is_record =
                    names_.parse(member.text).kind == Names::Parsed::Kind::record;
                if (is_record && (bucket != first || member.text >= from_name))
                    found.push_back(std::move(member.text));
            }
            // By name: ends of leases move while pages are read.
            std::sort(found.begin(), found.end());
            const auto full = take(page, found, [&](std::size_t i) {
                return "u" + std::to_string(bucket) + ":" + found[i];
            });
            if (!full) return full.error();
            if (*full) return {};
        }
    }
    return {};
}

/// Cursor: s, master's number, ':', names of that reply to pass over, ':', the server's cursor.
base::Result<void> Listing::scan_all(Page& page, const std::string& cursor) {
    std::size_t master = 0;
    std::size_t skip = 0;
    std::string at = "0";
    if (!cursor.empty()) {
        std::string_view rest;
        std::string_view server_cursor;
        if (cursor[0] != 's' || !split_number(std::string_view(cursor).substr(1), master, rest) ||
            !split_number(rest, skip, server_cursor) || server_cursor.empty())
            return foreign_cursor();
        at = server_cursor;
    }
    for (const std::vector<Node> masters = client_.masters(); master < masters.size();
         ++master, at = "0") {
        do {
            const Answer answer = client_.ask(
                masters[master].name,
                {"SCAN", at, "MATCH", names_.pattern(), "COUNT", std::string(scan_count)});
            if (const auto* none = std::get_if<NoReply>(&answer)) return failed(*none);
            const Reply& reply = std::get<Reply>(answer);
            if (reply.elements.size() != 2)
                return failed({.detail = "SCAN was answered by something else"});
            std::vector<std::string> found;
            for (const Reply& name : reply.elements[1].elements) {
                const bool again = std::find(found.begin(), found.end(), name.text) != found.end();
                if (!again && names_.parse(name.text).kind == Names::Parsed::Kind::record)
                    found.push_back(name.text);
            }
            const std::size_t passed = std::min(skip, found.size());
            found.erase(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(passed));
            skip = 0;
            const auto full = take(page, found, [&](std::size_t i) {
                return "s" + std::to_string(master) + ":" + std::to_string(passed + i) + ":" + at;
            });
            if (!full) return full.error();
            if (*full) return {};
            at = reply.elements[0].text;
        } while (at != "0");
    }
    return {};
}

Command Listing::purge_of(const std::string& name, const Names::Parsed& parsed) const {
    const std::uint16_t slot = names_.slot(bucket_of(parsed.key));
    if (parsed.kind == Names::Parsed::Kind::record)
        return purge_command(slot, {name}, {time_text(), "r"});
    if (parsed.kind == Names::Parsed::Kind::conversation)
        return purge_command(slot, {name}, {time_text(), "s"});
    return purge_command(slot, {name, names_.record(parsed.key)},
                         {time_text(), "c", std::to_string(parsed.token.value)});
}

base::Result<std::size_t> Listing::purge(std::size_t limit) {
    const std::lock_guard lock(purge_mutex_);
    std::size_t gone = 0;
    std::size_t looked_at = 0;
    const bool from_start = purge_at_.master == 0 && purge_at_.cursor == "0";
    int ends = 0;
    while (gone < limit && looked_at < purge_looks_at) {
        const std::vector<Node> masters = client_.masters();
        if (purge_at_.master >= masters.size()) purge_at_ = {};
        const Answer answer = client_.ask(masters[purge_at_.master].name,
                                          {"SCAN", purge_at_.cursor, "MATCH", names_.pattern(),
                                           "COUNT", std::string(scan_count)});
        if (const auto* none = std::get_if<NoReply>(&answer)) return failed(*none);
        const Reply& reply = std::get<Reply>(answer);
        if (reply.elements.size() != 2)
            return failed({.detail = "SCAN was answered by something else"});
        const std::vector<Reply>& found = reply.elements[1].elements;
        std::size_t next = 0;
        while (next < found.size() && gone < limit) {
            std::vector<Command> commands;
            std::vector<bool> counts;
            for (; next < found.size() && gone + commands.size() < limit; ++next) {
                const Names::Parsed parsed = names_.parse(found[next].text);
                if (parsed.kind == Names::Parsed::Kind::other) continue;
                commands.push_back(purge_of(found[next].text, parsed));
                counts.push_back(parsed.kind != Names::Parsed::Kind::chunk);
            }
            const auto removed = call(std::move(commands));
            if (!removed) return removed.error();
            for (std::size_t i = 0; i < removed->size(); ++i) {
                if (counts[i] && (*removed)[i].integer > 0) ++gone;
            }
        }
        looked_at += std::max<std::size_t>(next, 1);
        if (next < found.size()) break;  // the rest comes the next time, from the same cursor
        purge_at_.cursor = reply.elements[0].text;
        if (purge_at_.cursor != "0") continue;
        if (++purge_at_.master < masters.size()) continue;
        purge_at_ = {};
        if (++ends == (from_start ? 1 : 2)) break;
    }
    return gone;
}

}  // namespace semel::stores::redis
