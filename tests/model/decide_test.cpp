// The transition table in all small worlds, and the proof that the checker would see a flaw: every
// planted bug is found.
#include <gtest/gtest.h>

#include <iostream>

#include "model/small_worlds.hpp"

namespace semel::model {
namespace {

using namespace core;
using namespace std::chrono_literals;

Transition right(const RecordPtr& found, Operation operation, StoreTime now) {
    return decide(found, std::move(operation), now);
}

/// Counted in release: 16.4 million steps decided, 3.2 million of them changing something, in 8 s.
constexpr std::size_t length = 8;
/// The longest shortest counterexample among the planted bugs is shorter.
constexpr std::size_t planted_length = 5;

TEST(SmallWorlds, decide_breaks_no_invariant_in_any_sequence) {
    for (const Rules& rules : all_rules()) {
        const Explored explored = explore(rules, length, right);
        std::cout << rules.name << ": " << explored.steps << " steps decided, " << explored.worlds
                  << " of them changed the world\n";
        EXPECT_EQ(explored.broken, "") << rules.name << ": " << path_name(explored.path);
        EXPECT_GT(explored.worlds, 10'000U);
    }
}

/// A copy of the found record, changed before it is decided on.
template <class Change>
RecordPtr changed(const RecordPtr& found, Change change) {
    if (!found) return found;
    auto copy = std::make_shared<Record>(*found);
    change(*copy);
    return copy;
}

/// The transition with its record changed.
template <class Change>
Transition with(Transition transition, Change change) {
    if (transition.write != Transition::Write::none)
        transition.record = changed(transition.record, change);
    return transition;
}

/// Lets the operation name whoever is current.
template <class Op>
Decide unfenced() {
    return [](const RecordPtr& found, Operation operation, StoreTime now) {
        if (Op* op = std::get_if<Op>(&operation); op != nullptr && found) {
            op->token = found->token;
            op->nonce = found->nonce;
        }
        return decide(found, std::move(operation), now);
    };
}

/// Takes the nonce of whoever is current where the token fits.
template <class Op>
Decide nonce_ignored() {
    return [](const RecordPtr& found, Operation operation, StoreTime now) {
        if (Op* op = std::get_if<Op>(&operation);
            op != nullptr && found && (op->token.value == 0 || op->token == found->token)) {
            op->nonce = found->nonce;
        }
        return decide(found, std::move(operation), now);
    };
}

/// decide() on a changed record, for one kind of operation.
template <class Op, class Change>
Decide sees(Change change) {
    return [change](const RecordPtr& found, Operation operation, StoreTime now) {
        const bool mine = std::holds_alternative<Op>(operation);
        return decide(mine ? changed(found, change) : found, std::move(operation), now);
    };
}

/// decide() whose result is changed, for one kind of operation.
template <class Op, class Change>
Decide writes(Change change) {
    return [change](const RecordPtr& found, Operation operation, StoreTime now) {
        const bool mine = std::holds_alternative<Op>(operation);
        Transition transition = decide(found, std::move(operation), now);
        return mine ? with(std::move(transition), [&](Record& record) { change(record, now); })
                    : transition;
    };
}

struct Planted {
    const char* name;
    Decide decide;
};

std::vector<Planted> planted_bugs() {
    std::vector<Planted> bugs;
    bugs.push_back({"unfenced complete", unfenced<Complete>()});
    bugs.push_back({"unfenced fail", unfenced<Fail>()});
    bugs.push_back({"unfenced cancel", unfenced<Cancel>()});
    bugs.push_back({"unfenced renew", unfenced<Renew>()});
    bugs.push_back({"unfenced start", unfenced<Start>()});
    bugs.push_back({"complete ignores the nonce", nonce_ignored<Complete>()});
    bugs.push_back({"fail ignores the nonce", nonce_ignored<Fail>()});
    bugs.push_back({"cancel ignores the nonce", nonce_ignored<Cancel>()});
    bugs.push_back({"renew ignores the nonce", nonce_ignored<Renew>()});
    bugs.push_back({"release ignores the nonce", nonce_ignored<Release>()});
    bugs.push_back({"acquire ignores the nonce",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        if (Acquire* op = std::get_if<Acquire>(&operation); op != nullptr && found)
                            op->nonce = found->nonce;
                        return decide(found, std::move(operation), now);
                    }});
    bugs.push_back({"a lost reply is not given again",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        Acquire* op = std::get_if<Acquire>(&operation);
                        if (op != nullptr && found && found->nonce == op->nonce) op->nonce = {};
                        return decide(found, std::move(operation), now);
                    }});
    bugs.push_back(
        {"release deletes", [](const RecordPtr& found, Operation operation, StoreTime now) {
             const bool release = std::holds_alternative<Release>(operation);
             Transition transition = decide(found, std::move(operation), now);
             if (release && transition.write != Transition::Write::none)
                 transition.record = nullptr;
             return transition;
         }});
    bugs.push_back({"release costs an attempt",
                    writes<Release>([](Record& r, StoreTime) { r.uncharged_attempts = 0; })});
    bugs.push_back({"the token comes from the clock alone",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        Transition transition = decide(found, std::move(operation), now);
                        Granted* granted = std::get_if<Granted>(&transition.outcome);
                        if (granted == nullptr || granted->kind == Granted::Kind::repeated)
                            return transition;
                        granted->token.value = static_cast<std::uint64_t>(now.us);
                        return with(std::move(transition), [&](Record& r) {
                            r.token.value = static_cast<std::uint64_t>(now.us);
                        });
                    }});
    bugs.push_back({"tokens restart when a record expired",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        Transition transition = decide(found, std::move(operation), now);
                        Granted* granted = std::get_if<Granted>(&transition.outcome);
                        if (granted == nullptr || granted->kind != Granted::Kind::fresh)
                            return transition;
                        granted->token.value = 1;
                        return with(std::move(transition), [](Record& r) { r.token.value = 1; });
                    }});
    bugs.push_back({"resolve without compare-and-set",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        if (Resolve* op = std::get_if<Resolve>(&operation); op != nullptr && found)
                            op->token_seen = found->token;
                        return decide(found, std::move(operation), now);
                    }});
    bugs.push_back(
        {"resolve keeps the token", [](const RecordPtr& found, Operation operation, StoreTime now) {
             const bool resolve = std::holds_alternative<Resolve>(operation);
             Transition transition = decide(found, std::move(operation), now);
             if (!resolve) return transition;
             return with(std::move(transition), [&](Record& r) {
                 r.token = found->token;
                 r.nonce = found->nonce;
             });
         }});
    bugs.push_back({"resolve of anything", sees<Resolve>([](Record& r) {
                        if (r.status == Status::failed && !r.final) r.status = Status::unknown;
                    })});
    bugs.push_back({"reopen without compare-and-set",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        if (Reopen* op = std::get_if<Reopen>(&operation); op != nullptr && found)
                            op->generation_seen = found->generation;
                        return decide(found, std::move(operation), now);
                    }});
    bugs.push_back({"completed after it was cancelled",
                    sees<Complete>([](Record& r) { r.final = r.cancelled = false; })});
    bugs.push_back({"failed after it was cancelled",
                    sees<Fail>([](Record& r) { r.final = r.cancelled = false; })});
    bugs.push_back({"run again after it was cancelled",
                    sees<Acquire>([](Record& r) { r.final = r.cancelled = false; })});
    bugs.push_back({"a repeated complete overwrites", sees<Complete>([](Record& r) {
                        if (r.status == Status::completed) {
                            r.status = Status::unknown;
                            r.expires = {};
                        }
                    })});
    bugs.push_back({"fail reopens a completed record", sees<Fail>([](Record& r) {
                        if (r.status == Status::completed) {
                            r.status = Status::unknown;
                            r.expires = {};
                        }
                    })});
    bugs.push_back({"mismatch tested after busy",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        Acquire* op = std::get_if<Acquire>(&operation);
                        if (op != nullptr && found && found->status == Status::processing)
                            op->fingerprint = found->fingerprint;
                        return decide(found, std::move(operation), now);
                    }});
    bugs.push_back(
        {"no fingerprint at all", [](const RecordPtr& found, Operation operation, StoreTime now) {
             if (Acquire* op = std::get_if<Acquire>(&operation); op != nullptr && found)
                 op->fingerprint = found->fingerprint;
             return decide(found, std::move(operation), now);
         }});
    bugs.push_back(
        {"a live lease is taken over", sees<Acquire>([](Record& r) { r.lease_end = {}; })});
    bugs.push_back({"a dead lease is never taken over", sees<Acquire>([](Record& r) {
                        if (r.status == Status::processing) r.lease_end = {INT64_MAX};
                    })});
    bugs.push_back(
        {"the sweeper settles a live lease", sees<Settle>([](Record& r) { r.lease_end = {}; })});
    bugs.push_back({"the sweeper gives a paid call back for free",
                    sees<Settle>([](Record& r) { r.call_started = false; })});
    bugs.push_back({"hold is ignored at takeover",
                    sees<Acquire>([](Record& r) { r.policy.on_unknown = OnUnknown::rerun; })});
    bugs.push_back({"hold is ignored by the sweeper",
                    sees<Settle>([](Record& r) { r.policy.on_unknown = OnUnknown::rerun; })});
    bugs.push_back({"an unknown outcome passes for free",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        if (Fail* op = std::get_if<Fail>(&operation);
                            op != nullptr && op->certainty == Certainty::unknown)
                            op->certainty = Certainty::not_processed;
                        return decide(found, std::move(operation), now);
                    }});
    bugs.push_back({"a possible second payment is not counted",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        const std::uint32_t before = found ? found->possible_second_payments : 0;
                        return with(decide(found, std::move(operation), now),
                                    [&](Record& r) { r.possible_second_payments = before; });
                    }});
    bugs.push_back({"a possible second payment is not told",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        Transition transition = decide(found, std::move(operation), now);
                        if (Granted* granted = std::get_if<Granted>(&transition.outcome))
                            granted->possible_second_payment = false;
                        return transition;
                    }});
    bugs.push_back({"attempts are not counted",
                    [](const RecordPtr& found, Operation operation, StoreTime now) {
                        const std::uint32_t before = found ? std::max(found->attempt, 1U) : 1;
                        return with(decide(found, std::move(operation), now),
                                    [&](Record& r) { r.attempt = before; });
                    }});
    bugs.push_back({"the budget is ignored", sees<Acquire>([](Record& r) {
                        if (r.status == Status::failed && !r.final)
                            r.uncharged_attempts = r.attempt;
                    })});
    bugs.push_back({"a running record expires",
                    writes<Acquire>([](Record& r, StoreTime now) { r.expires = now + 1h; })});
    bugs.push_back(
        {"a message waiting for its retry expires", writes<Fail>([](Record& r, StoreTime now) {
             if (r.expires.us == 0) r.expires = now + 1h;
         })});
    bugs.push_back({"a completed record never expires",
                    writes<Complete>([](Record& r, StoreTime) { r.expires = {}; })});
    bugs.push_back({"a late truth is refused", sees<Complete>([](Record& r) {
                        if (r.status == Status::unknown || r.status == Status::failed) r.nonce = {};
                    })});
    bugs.push_back({"a late truth is refused once DEAD", sees<Complete>([](Record& r) {
                        if (r.status == Status::dead) r.nonce = {};
                    })});
    bugs.push_back(
        {"not_after is ignored", [](const RecordPtr& found, Operation operation, StoreTime now) {
             if (Acquire* op = std::get_if<Acquire>(&operation)) op->not_after = {INT64_MAX};
             return decide(found, std::move(operation), now);
         }});
    bugs.push_back(
        {"a message is granted before it is due", sees<Acquire>([](Record& r) { r.due = {}; })});
    return bugs;
}

TEST(SmallWorlds, every_planted_bug_is_found) {
    for (const Planted& bug : planted_bugs()) {
        Explored found;
        std::string world;
        // Shortest first, so that what is printed is the story a person wants to read.
        for (std::size_t steps = 2; steps <= planted_length && found.broken.empty(); ++steps) {
            for (const Rules& rules : all_rules()) {
                found = explore(rules, steps, bug.decide);
                world = rules.name;
                if (!found.broken.empty()) break;
            }
        }
        EXPECT_NE(found.broken, "") << "not found: " << bug.name;
        std::cout << bug.name << ": " << found.broken << " [" << world << ": "
                  << path_name(found.path) << "]\n";
    }
}

}  // namespace
}  // namespace semel::model
