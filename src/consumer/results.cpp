#include "consumer/results.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/assert.hpp"
#include "base/fault_point.hpp"
#include "base/hash.hpp"

namespace semel::consumer {

namespace {

/// A claim that the store grants later than this after it was asked for is not wanted.
constexpr milliseconds claim_patience{5000};
/// A claim that the store's clock overtook is asked again so often.
constexpr std::uint32_t late_max = 3;
constexpr milliseconds busy_min{50};
/// Between two tries to say that a result is published; doubled each time.
constexpr milliseconds again_first{50};
constexpr milliseconds again_max{2000};
constexpr std::uint16_t status_answered = 200;
constexpr std::string_view plain_content_type = "application/octet-stream";

}  // namespace

struct Results::Work {
    enum class State : std::uint8_t { claiming, publishing, marking };
    std::list<Work>::iterator at;
    State state = State::claiming;
    base::Digest key;  ///< Of the mark.
    std::string id, business_key;
    HandlerAnswerPtr answer;
    Done done;
    core::Nonce nonce;
    core::FencingToken token;  ///< 0: no mark is held.
    std::uint32_t late = 0;
    milliseconds again{0};
    runtime::TimerId timer = 0;
};

/// What the publisher's thread holds.
struct Results::Gate {
    std::mutex mutex;
    Results* owner = nullptr;
    /// While there are any, a post is under way.
    std::vector<std::pair<Work*, base::Result<void>>> confirmed;
};

Results::Results(runtime::Loop& loop, ResultsOptions options, Records* records,
                 PublishResult publish)
    : loop_(loop),
      options_(std::move(options)),
      records_(records),
      publish_(std::move(publish)),
      gate_(std::make_shared<Gate>()) {
    SEMEL_ASSERT(publish_ != nullptr, "results go somewhere");
    SEMEL_ASSERT(options_.republish || records_ != nullptr, "marks lie somewhere");
    gate_->owner = this;
    std::memcpy(&nonce_base_, base::random_bytes(sizeof nonce_base_).data(), sizeof nonce_base_);
    if (options_.republish) return;
    queue_.emplace(
        loop_, *records_,
        [this](const RecordQueue::Tag& tag, const Answered& result) {
            if (tag.of == nullptr) return;  // given back, as far as could be
            Work& work = *static_cast<Work*>(tag.of);
            if (work.state == Work::State::claiming) return claimed(work, result);
            marked(work, result);
        },
        [] {});
}

Results::~Results() {
    {
        const std::lock_guard lock(gate_->mutex);
        gate_->owner = nullptr;
    }
    for (const Work& work : works_) loop_.cancel(work.timer);
}

void Results::publish(const Message& message, HandlerAnswerPtr answer, Done done) {
    SEMEL_ASSERT(answer != nullptr, "there is something to publish");
    Work& work = works_.emplace_front();
    work.at = works_.begin();
    work.id = message.id;
    work.business_key = message.business_key;
    work.answer = std::move(answer);
    work.done = std::move(done);
    if (options_.republish) return send(work);
    std::string name = "published";
    name += message.key.view();
    name += base::sha256(work.answer->body).view();
    work.key = base::sha256(name);
    work.nonce = fresh_nonce();
    claim(work);
}

RecordStep Results::step_on_mark(const Work& work, core::Operation operation) {
    // In a table people see whose result it is; the digest keeps it apart from every message.
    return {.key = work.key,
            .source = "result " + base::hex(work.key.view()),
            .id = work.id,
            .business_key = work.business_key,
            .operation = std::move(operation)};
}

/// Unique is enough: an unpredictable part per object, and a counter.
core::Nonce Results::fresh_nonce() {
    core::Nonce nonce;
    const std::uint64_t count = ++last_nonce_;
    std::memcpy(nonce.bytes.data(), &nonce_base_, sizeof nonce_base_);
    std::memcpy(nonce.bytes.data() + sizeof nonce_base_, &count, sizeof count);
    return nonce;
}

void Results::claim(Work& work) {
    core::Acquire acquire;
    acquire.fingerprint.raw = work.key;
    acquire.fingerprint.canonical = work.key;
    acquire.owner = options_.owner;
    acquire.nonce = work.nonce;
    acquire.lease = options_.lease;
    acquire.not_after =
        queue_->latest_now().value_or(core::StoreTime{loop_.clock().wall_us()}) + claim_patience;
    acquire.policy.kind = core::IntentKind::message;
    acquire.policy.on_unknown = core::OnUnknown::rerun;
    acquire.policy.retention_completed = options_.retention;
    acquire.policy.retention_failed = options_.retention;
    acquire.policy.retention_dead = options_.retention;
    acquire.label = "result";
    queue_->push(step_on_mark(work, std::move(acquire)), {&work, 0});
}

void Results::claimed(Work& work, const Answered& result) {
    if (!result) {
        if (result.error().applied != base::Applied::no) give_back(work);
        return finish(work, Ill{records_->name() + ": " + result.error().detail});
    }
    const core::StoreOutcome& outcome = result->outcome;
    if (const auto* granted = std::get_if<core::Granted>(&outcome)) {
        work.token = granted->token;
        return send(work);
    }
    if (const auto* replay = std::get_if<core::Replay>(&outcome);
        replay != nullptr && replay->record->status == core::Status::completed)
        return finish(work, std::nullopt);
    if (const auto* flight = std::get_if<core::InFlight>(&outcome))
        return finish(work, Busy{std::clamp(flight->remaining, busy_min, options_.lease)});
    if (std::holds_alternative<core::Late>(outcome)) {
        if (++work.late <= late_max) return claim(work);
        return finish(work, Ill{records_->name() +
                                ": its clock was past the time limit of each claim: check its "
                                "clock"});
    }
    // Somebody has decided about the mark by hand: what it says is not known, so it is published.
    send(work);
}

void Results::send(Work& work) {
    work.state = Work::State::publishing;
    base::fault_point("consumer.publish.before");
    publish_(work.id, work.answer, [gate = gate_, at = &work](base::Result<void> result) {
        const std::lock_guard lock(gate->mutex);
        if (gate->owner == nullptr) return;
        gate->confirmed.emplace_back(at, std::move(result));
        if (gate->confirmed.size() > 1) return;
        gate->owner->loop_.post([gate] {
            if (gate->owner != nullptr) gate->owner->heard();
        });
    });
}

void Results::heard() {
    std::vector<std::pair<Work*, base::Result<void>>> confirmed_now;
    {
        const std::lock_guard lock(gate_->mutex);
        confirmed_now.swap(gate_->confirmed);
    }
    const std::shared_ptr<Gate> gate = gate_;
    for (auto& [work, result] : confirmed_now) {
        confirmed(*work, std::move(result));
        if (gate->owner == nullptr) return;
    }
}

void Results::confirmed(Work& work, base::Result<void> result) {
    if (result) {
        base::fault_point("consumer.publish.after");
        if (work.token.value == 0) return finish(work, std::nullopt);
        work.state = Work::State::marking;
        return mark(work);
    }
    give_back(work);
    if (result.error().code == base::ErrorCode::invalid_argument) {
        return finish(work, Dead{.why = DeadClass::fatal,
                                 .reason = "it is handled and its answer recorded, and the answer "
                                           "cannot be published: " +
                                           result.error().detail});
    }
    finish(work, Ill{"results cannot be published: " + result.error().detail +
                     "; they are published as soon as that works"});
}

void Results::mark(Work& work) {
    core::Answer nothing;
    nothing.http_status = status_answered;
    queue_->push(
        step_on_mark(work, core::Complete{work.token, work.nonce, std::move(nothing), {}, {}}),
        {&work, 0});
}

void Results::marked(Work& work, const Answered& result) {
    // Fenced: another took the claim over and publishes the same once more, or the store has
    // forgotten it. Published it is.
    if (result) return finish(work, std::nullopt);
    work.again = work.again.count() == 0 ? again_first : std::min(work.again * 2, again_max);
    work.timer = loop_.at(loop_.now() + work.again, [this, &work] {
        work.timer = 0;
        mark(work);
    });
}

/// If it does not arrive, the lease runs out.
void Results::give_back(const Work& work) {
    if (!queue_) return;
    queue_->push(step_on_mark(work, core::Release{work.token, work.nonce}), {nullptr, 0});
}

void Results::finish(Work& work, std::optional<Verdict> verdict) {
    const Done done = std::move(work.done);
    works_.erase(work.at);
    done(std::move(verdict));
}

std::string Results::promise() const {
    return options_.republish
               ? "Answers are recorded, then published before the message is settled, and again "
                 "for each duplicate: always the same bytes under the same id."
               : "Answers are recorded, then published before the message is settled; a duplicate "
                 "publishes nothing, and one that is published again after a death has the same "
                 "bytes and id.";
}

core::Answer recorded_answer(const HandlerAnswerPtr& answer) {
    core::Answer out;
    out.http_status = status_answered;
    if (!answer) return out;
    out.content_type =
        answer->content_type.empty() ? std::string(plain_content_type) : answer->content_type;
    out.headers = answer->headers;
    out.body = std::shared_ptr<const std::string>(answer, &answer->body);
    out.body_bytes = answer->body.size();
    out.body_digest = base::sha256(answer->body);
    return out;
}

HandlerAnswerPtr answer_of(const core::Record& record) {
    // Each recorded answer has a content type, and nothing else that completes a message has one.
    if (!record.answer || record.answer->content_type.empty()) return nullptr;
    auto out = std::make_shared<HandlerAnswer>();
    out->content_type = record.answer->content_type;
    out->headers = record.answer->headers;
    if (record.answer->body) out->body = *record.answer->body;
    return out;
}

}  // namespace semel::consumer
