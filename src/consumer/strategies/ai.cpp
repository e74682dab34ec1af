#include "consumer/strategies/ai.hpp"

#include <algorithm>
#include <deque>
#include <list>
#include <random>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/assert.hpp"
#include "base/fault_point.hpp"
#include "consumer/identity.hpp"

namespace semel::consumer {

using namespace std::chrono_literals;

namespace {

/// How long a message waits before it asks again for a call that somebody else makes.
constexpr milliseconds ask_again_min{1000};
constexpr milliseconds ask_again_max{2000};

/// What is remembered of a message while it is worked on, and of the last ones that were.
class KnownMessages {
  public:
    struct Known {
        base::Digest key;
        std::uint32_t failed = 0;
        std::int64_t first_failure_ms = 0;
        bool paid = false;  ///< This process caused the call, and has not said Applied yet.
    };
    /// Valid until the next call.
    Known& of(const base::Digest& key) {
        const auto found = by_key_.find(key);
        if (found != by_key_.end()) {
            used_.splice(used_.begin(), used_, found->second);
            return used_.front();
        }
        if (used_.size() == ai_known_max) {
            by_key_.erase(used_.back().key);
            used_.pop_back();
        }
        used_.push_front({.key = key});
        by_key_.emplace(key, used_.begin());
        return used_.front();
    }

  private:
    std::list<Known> used_;  ///< The latest first.
    std::unordered_map<base::Digest, std::list<Known>::iterator, base::DigestHash> by_key_;
};

std::string answered(const ChatAnswer& answer) {
    std::string text = "/api/chat answered " + std::to_string(answer.status);
    if (!answer.problem.empty()) text += " " + answer.problem;
    if (answer.upstream_status != 0)
        text += " (the AI service: " + std::to_string(answer.upstream_status) + ")";
    return text;
}

/// The status lets nothing through, whatever is asked: credentials, balance, address.
bool service_is_ill(int upstream_status) {
    switch (upstream_status) {
        case 401:
        case 402:
        case 403:
        case 404:
        case 405:
        case 407:
        case 410:
        case 421:
            return true;
        default:
            return false;
    }
}

/// Another try of the same turn most likely ends the same.
bool refuses_turn(int status) {
    return status >= 400 && status <= 499 && status != 408 && status != 409 && status != 425 &&
           status != 429;
}

class Ai final : public Strategy {
  public:
    Ai(runtime::Loop& loop, AiOptions options, AskChat ask, Results* results,
       ConsumerCounters& counters)
        : loop_(loop),
          options_(std::move(options)),
          ask_(std::move(ask)),
          results_(results),
          counters_(counters),
          random_(std::random_device{}()) {}
    ~Ai() override { *alive_ = false; }

    [[nodiscard]] std::size_t capacity() const override {
        if (stopping_ || closed_) return 0;
        return options_.concurrency - std::min<std::size_t>(options_.concurrency, in_hand_);
    }
    void run(std::vector<Message*> messages, bool alone, const Answer& answer) override;
    AssignAnswer assigned(const brokers::AssignmentPtr&) override { return BeginAt{}; }
    void leaving(const brokers::AssignmentPtr& assignment) override;
    void watermark(const brokers::AssignmentPtr&, std::int64_t) override {}
    void letter_published(const Message&, const Dead&,
                          std::function<void(base::Result<void>)> done) override {
        done({});
    }
    void stop(milliseconds within, std::function<void()> done) override;
    [[nodiscard]] std::string promise() const override;

  private:
    /// Messages of one lane (or one message of none): the first of them runs.
    struct Chain {
        std::deque<Message*> messages;
        std::shared_ptr<const Answer> answer;
    };
    using ChainPtr = std::shared_ptr<Chain>;

    void next(const ChainPtr& chain);
    std::variant<ChatTurn, std::string> turn_of(const Message& message) const;
    void heard(const ChainPtr& chain, ChatAnswer answer);
    [[nodiscard]] Verdict judge(const Message& message, const ChatAnswer& answer);
    [[nodiscard]] Verdict failed(const Message& message, const ChatAnswer& answer);
    void publish(const ChainPtr& chain, std::string body);
    /// The call's effect is durable, and its result is published where one is wanted.
    [[nodiscard]] Verdict settled(const Message& message);
    void finish(const ChainPtr& chain, Verdict verdict);
    void hold_behind(Chain& chain, std::size_t from);
    void tell(Chain& chain, Message& message, Verdict verdict);

    runtime::Loop& loop_;
    const AiOptions options_;
    const AskChat ask_;
    Results* const results_;
    ConsumerCounters& counters_;
    std::minstd_rand random_;
    KnownMessages known_;
    std::unordered_set<ChainPtr> running_;
    std::size_t in_hand_ = 0;
    bool stopping_ = false;
    bool closed_ = false;  ///< The gateway of this process takes no more turns.
    runtime::TimerId stop_timer_ = 0;
    std::function<void()> stopped_;
    /// Answers that come after this object's end find it false. Read and written on the loop only.
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

void Ai::run(std::vector<Message*> messages, bool, const Answer& answer) {
    const auto shared = std::make_shared<const Answer>(answer);
    in_hand_ += messages.size();
    std::vector<ChainPtr> chains;
    std::unordered_map<std::uint64_t, ChainPtr> by_lane;
    for (Message* const message : messages) {
        ChainPtr own;
        ChainPtr& chain = message->lane == 0 ? own : by_lane[message->lane];
        if (!chain) {
            chain = std::make_shared<Chain>();
            chain->answer = shared;
            chains.push_back(chain);
        }
        chain->messages.push_back(message);
    }
    for (const ChainPtr& chain : chains) {
        running_.insert(chain);
        next(chain);
    }
}

std::variant<ChatTurn, std::string> Ai::turn_of(const Message& message) const {
    const config::AiHandlerConfig& config = options_.config;
    ChatTurn turn{.tenant = config.tenant,
                  .session = message.id,
                  .request_id = message.id,
                  .model = config.model,
                  .hold_unknown = options_.hold_unknown};
    std::string problem;
    const auto read = [&](const char* what, const config::ValueSpec& spec, std::string& into) {
        auto found = extract(message.delivery, spec);
        if (const auto* error = std::get_if<ExtractError>(&found)) {
            problem = std::string("its ") + what + " cannot be read: " + error->reason;
            return;
        }
        auto& text = std::get<Extracted>(found).text;
        if (!text) {
            problem = std::string("it has no ") + what + " (handler.ai." + what + ")";
            return;
        }
        into = std::move(*text);
    };
    if (config.user) read("user", *config.user, turn.user);
    if (config.session) read("session", *config.session, turn.session);
    read("prompt", config.prompt, turn.prompt);
    if (!problem.empty()) return problem;
    return turn;
}

void Ai::next(const ChainPtr& chain) {
    Message& message = *chain->messages.front();
    auto turn = turn_of(message);
    if (const auto* problem = std::get_if<std::string>(&turn)) {
        finish(chain, Dead{.why = DeadClass::decode, .reason = *problem});
        return;
    }
    base::fault_point("consumer.claim.before");
    base::fault_point("consumer.effect.before");
    ask_(std::get<ChatTurn>(std::move(turn)),
         [this, chain, &loop = loop_, alive = alive_](ChatAnswer answer) mutable {
             loop.post([this, chain = std::move(chain), alive = std::move(alive),
                        answer = std::move(answer)]() mutable {
                 if (*alive && !chain->messages.empty()) heard(chain, std::move(answer));
             });
         });
}

void Ai::heard(const ChainPtr& chain, ChatAnswer answer) {
    Message& message = *chain->messages.front();
    if (answer.status != 200) {
        finish(chain, judge(message, answer));
        return;
    }
    base::fault_point("consumer.effect.after");
    KnownMessages::Known& known = known_.of(message.key);
    if (!answer.replayed) known.paid = true;
    if (results_ == nullptr) {
        finish(chain, settled(message));
    } else {
        publish(chain, std::move(answer.body));
    }
}

void Ai::publish(const ChainPtr& chain, std::string body) {
    auto result = std::make_shared<HandlerAnswer>();
    result->body = std::move(body);
    result->content_type = "application/json";
    const Message& message = *chain->messages.front();
    const bool again = !known_.of(message.key).paid;
    results_->publish(message, std::move(result), again,
                      [this, chain, alive = alive_](std::optional<Verdict> ended) {
                          if (!*alive || chain->messages.empty()) return;
                          if (ended) return finish(chain, std::move(*ended));
                          base::fault_point("consumer.record.after");
                          finish(chain, settled(*chain->messages.front()));
                      });
}

Verdict Ai::settled(const Message& message) {
    KnownMessages::Known& known = known_.of(message.key);
    known.failed = 0;
    known.first_failure_ms = 0;
    if (std::exchange(known.paid, false)) return Applied{};
    return Duplicate{};
}

Verdict Ai::judge(const Message& message, const ChatAnswer& answer) {
    const std::string& slug = answer.problem;
    if (answer.status == 0) {
        closed_ = true;
        return Held{};
    }
    if (answer.status == 202 || slug == "in-flight" || slug == "busy" || slug == "too-many-waiters")
        return Busy{std::clamp(answer.retry_after, ask_again_min, ask_again_max)};
    if (slug == "key-reused") {
        ++counters_.mismatches;
        if (options_.mismatch_is_duplicate) return Duplicate{};
        return Dead{.why = DeadClass::mismatch,
                    .reason = answered(answer) + ": its id names another turn of this session"};
    }
    if (slug == "outcome-unknown") {
        ++counters_.unknown_outcomes;
        return Dead{.why = DeadClass::unknown,
                    .reason = answered(answer) +
                              ": the AI service may have processed the turn, and no usable answer "
                              "came; decide with semel record resolve"};
    }
    if (slug == "attempts-used-up")
        return Dead{.why = DeadClass::attempts,
                    .reason = answered(answer) + ": max_paid_attempts of /api/chat are used up"};
    if (slug == "answer-not-kept" || slug == "expired") {
        // The turn happened; there is nothing to publish of it.
        if (results_ == nullptr) return Duplicate{};
        return Dead{.why = DeadClass::fatal,
                    .reason = answered(answer) +
                              ": the turn is decided, and its answer is not there to be published"};
    }
    if (slug == "cancelled") return Dead{.why = DeadClass::fatal, .reason = answered(answer)};
    if (slug == "store-unavailable" || slug == "draining" || slug == "upstream-unreachable")
        return Ill{answered(answer)};
    if (slug == "model-not-found")
        return Ill{answered(answer) +
                   ": no configured upstream serves the model of this consumer; correct "
                   "handler.ai.model or upstreams"};
    if (answer.final)
        return Dead{.why = DeadClass::fatal,
                    .reason = answered(answer) + ": the refusal is recorded for good"};
    if (service_is_ill(answer.upstream_status))
        return Ill{answered(answer) +
                   ": check the upstream's credential, balance, base_url and model"};
    if (refuses_turn(answer.upstream_status != 0 ? answer.upstream_status : answer.status))
        return Dead{.why = DeadClass::fatal, .reason = answered(answer)};
    return failed(message, answer);
}

Verdict Ai::failed(const Message& message, const ChatAnswer& answer) {
    if (answer.upstream_status == 0) ++counters_.unknown_outcomes;
    KnownMessages::Known& known = known_.of(message.key);
    if (known.failed++ == 0) known.first_failure_ms = loop_.clock().wall_us() / 1000;
    const double random = std::uniform_real_distribution<double>(0.0, 1.0)(random_);
    if (const auto wait = options_.retry.wait_after(known.failed, answer.retry_after, random))
        return Retry{.delay = *wait, .reason = answered(answer)};
    // A redriven one begins anew.
    return Dead{.why = DeadClass::attempts,
                .reason = answered(answer),
                .failed_runs = std::exchange(known.failed, 0),
                .first_failure_ms = std::exchange(known.first_failure_ms, 0)};
}

void Ai::tell(Chain& chain, Message& message, Verdict verdict) {
    --in_hand_;
    (*chain.answer)(message, std::move(verdict));
}

void Ai::hold_behind(Chain& chain, std::size_t from) {
    while (chain.messages.size() > from) {
        Message& message = *chain.messages[from];
        chain.messages.erase(chain.messages.begin() + static_cast<std::ptrdiff_t>(from));
        tell(chain, message, Held{});
    }
}

void Ai::finish(const ChainPtr& chain, Verdict verdict) {
    const bool was_full = capacity() == 0;
    const bool goes_on =
        std::holds_alternative<Applied>(verdict) || std::holds_alternative<Duplicate>(verdict);
    Message& message = *chain->messages.front();
    chain->messages.pop_front();
    tell(*chain, message, std::move(verdict));
    if (!goes_on || stopping_) hold_behind(*chain, 0);
    if (chain->messages.empty()) {
        running_.erase(chain);
        if (running_.empty() && stopped_) {
            loop_.cancel(stop_timer_);
            std::exchange(stopped_, nullptr)();
            return;
        }
    } else {
        next(chain);
    }
    if (was_full && capacity() > 0 && on_capacity) on_capacity();
}

void Ai::leaving(const brokers::AssignmentPtr& assignment) {
    const std::vector<ChainPtr> chains(running_.begin(), running_.end());
    for (const ChainPtr& chain : chains) {
        if (!chain->messages.empty() &&
            chain->messages.front()->delivery.receipt.assignment == assignment)
            hold_behind(*chain, 1);
    }
}

void Ai::stop(milliseconds within, std::function<void()> done) {
    SEMEL_ASSERT(!stopping_, "a strategy is stopped once");
    stopping_ = true;
    const std::vector<ChainPtr> chains(running_.begin(), running_.end());
    for (const ChainPtr& chain : chains) {
        if (!chain->messages.empty()) hold_behind(*chain, 1);
    }
    if (running_.empty()) {
        done();
        return;
    }
    stopped_ = std::move(done);
    stop_timer_ = loop_.at(loop_.now() + within, [this, alive = alive_] {
        if (!*alive) return;
        // Their calls go on in the gateway and are recorded there; here they end as if this process
        // had died: nothing is settled.
        const std::vector<ChainPtr> left(running_.begin(), running_.end());
        running_.clear();
        for (const ChainPtr& chain : left) hold_behind(*chain, 0);
        std::exchange(stopped_, nullptr)();
    });
}

std::string Ai::promise() const {
    std::string text =
        "each message is a turn of /api/chat, paid for once under the key that it has over HTTP, "
        "on "
        "the conditions of that route; failed turns are counted in this process only, so that a "
        "restart counts anew";
    if (results_ != nullptr) text += ". " + results_->promise();
    return text;
}

}  // namespace

std::unique_ptr<Strategy> make_ai(runtime::Loop& loop, AiOptions options, AskChat ask,
                                  Results* results, ConsumerCounters& counters) {
    SEMEL_ASSERT(ask != nullptr, "an ai consumer has a gateway to ask");
    return std::make_unique<Ai>(loop, std::move(options), std::move(ask), results, counters);
}

}  // namespace semel::consumer
