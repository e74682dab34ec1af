#include "consumer/group_check.hpp"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "base/hash.hpp"

namespace semel::consumer {
namespace {

using std::chrono::milliseconds;

constexpr std::string_view mark_prefix = "semel-store=";
constexpr std::size_t mark_id_max_bytes = 64;
/// For one question to the broker.
constexpr milliseconds ask_timeout{3000};
constexpr milliseconds ask_again_first{100};
constexpr milliseconds ask_again_max{2000};

/// What is safe in a client.id, in a commit's text and at the end of a word.
bool safe(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
}

/// The id of the last mark in `text`; empty: there is none.
std::string_view marked(std::string_view text) {
    const std::size_t at = text.rfind(mark_prefix);
    if (at == std::string_view::npos) return {};
    text.remove_prefix(at + mark_prefix.size());
    const auto end = std::find_if_not(text.begin(), text.end(), safe);
    return text.substr(0, static_cast<std::size_t>(end - text.begin()));
}

constexpr const char* cure =
    "A store that is not shared serves one process: use redis, postgres or mysql as the store, or, "
    "if "
    "doubled effects are acceptable, set `accept: [unshared_store]`";

std::string named(const brokers::GroupMember& member) {
    std::string out = "`" + (member.client_id.empty() ? member.id : member.client_id) + "`";
    if (!member.host.empty()) out += " (" + member.host + ")";
    return out;
}

struct Seen {
    brokers::GroupDescription group;
    std::vector<brokers::CommittedPosition> commits;
};

GroupFinding judge(const Seen& seen, std::string_view own, const std::string& group) {
    const brokers::CommittedPosition* of_another = nullptr;
    bool of_own = false;
    for (const brokers::CommittedPosition& commit : seen.commits) {
        const std::string_view id = marked(commit.metadata);
        if (id == own) {
            of_own = true;
        } else if (!id.empty() && of_another == nullptr) {
            of_another = &commit;
        }
    }
    if (of_another != nullptr) {
        return {.stays = false,
                .sentence = "the group `" + group + "` has committed " +
                            of_another->partition.topic + "-" +
                            std::to_string(of_another->partition.number) + " under the store `" +
                            std::string(marked(of_another->metadata)) + "`, and this one is `" +
                            std::string(own) +
                            "`: what that store knows to be done would be done again here. Bring "
                            "the former data directory back. " +
                            cure};
    }
    // A former process of ours may still be listed until its session ends: it had the same store,
    // which one process holds.
    const auto other = std::find_if(
        seen.group.members.begin(), seen.group.members.end(),
        [&](const brokers::GroupMember& one) { return !one.self && marked(one.client_id) != own; });
    if (other == seen.group.members.end()) return {};
    const std::string what = "the group `" + group + "` has another member, " + named(*other) +
                             ", whose store this process cannot see";
    if (of_own) {
        return {.stays = true,
                .sentence = what +
                            ". This one stays, because the group's positions were committed "
                            "under its store; end the other. " +
                            cure};
    }
    return {.stays = false, .sentence = what + ". This one leaves. " + cure};
}

/// Error: the broker cannot say it (yet).
base::Result<Seen> ask(brokers::Source& source, std::string_view own, milliseconds within) {
    auto described = source.describe(within);
    if (!described) return std::move(described.error());
    // A coordinator that has just taken the group over, or a group between two generations, may not
    // list its members.
    const bool listed = std::any_of(
        described->members.begin(), described->members.end(),
        [&](const brokers::GroupMember& one) { return one.self || marked(one.client_id) == own; });
    if (!listed) {
        return base::Error{.code = base::ErrorCode::io,
                           .detail = "the group's coordinator does not list this member (state `" +
                                     described->state + "`)"};
    }
    auto commits = source.committed(within);
    if (!commits) return std::move(commits.error());
    return Seen{.group = std::move(*described), .commits = std::move(*commits)};
}

/// A store's id as its mark holds it.
std::string mark_id(const std::string& store_id) {
    const bool as_it_is = !store_id.empty() && store_id.size() <= mark_id_max_bytes &&
                          std::all_of(store_id.begin(), store_id.end(), safe);
    return as_it_is ? store_id : base::base64url(base::sha256(store_id).view());
}

}  // namespace

std::string store_mark(const std::string& store_id) {
    return std::string(mark_prefix) + mark_id(store_id);
}

GroupFinding check_unshared_group(brokers::Source& source, const std::string& store_id,
                                  const std::string& group, milliseconds patience) {
    const GroupWaiting real{.now = [] { return base::system_clocks().steady(); },
                            .wait = [](milliseconds time) { std::this_thread::sleep_for(time); }};
    return check_unshared_group(source, store_id, group, patience, real);
}

GroupFinding check_unshared_group(brokers::Source& source, const std::string& store_id,
                                  const std::string& group, milliseconds patience,
                                  const GroupWaiting& waiting) {
    if (!source.traits().commits_positions) return {};  // a queue: subscribed to exclusively
    const std::string own = mark_id(store_id);
    const base::SteadyTime until = waiting.now() + patience;
    milliseconds pause = ask_again_first;
    for (;;) {
        auto left = std::chrono::ceil<milliseconds>(until - waiting.now());
        const auto seen = ask(source, own, std::clamp(left, milliseconds{1}, ask_timeout));
        if (seen) return judge(*seen, own, group);
        left = std::chrono::ceil<milliseconds>(until - waiting.now());
        if (left <= milliseconds{0}) {
            return {.stays = false,
                    .sentence = "who is in the group `" + group +
                                "` could not be found out within " +
                                std::to_string(patience.count()) + " ms: " + seen.error().detail +
                                ". Without knowing it, a store that is not shared is not used"};
        }
        waiting.wait(std::min(pause, left));
        pause = std::min(pause * 2, ask_again_max);
    }
}

}  // namespace semel::consumer
