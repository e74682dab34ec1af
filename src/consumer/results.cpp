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
/// From the first publication of a group; then those that are confirmed wait for no others.
constexpr milliseconds group_patience{1000};
/// The last header of a recorded answer: the group it is of. Not published.
constexpr std::string_view group_header = "semel-group";

/// Of a step on a mark.
enum Kind : std::uint8_t { of_one, of_group };

milliseconds longer(milliseconds& wait) {
    wait = wait.count() == 0 ? again_first : std::min(wait * 2, again_max);
    return wait;
}

std::string group_of(const core::Record& record) {
    const auto& headers = record.answer->headers;
    return !headers.empty() && headers.back().first == group_header ? headers.back().second
                                                                    : std::string();
}

}  // namespace

struct Results::Work {
    enum class State : std::uint8_t { looking, claiming, publishing, gathered, marking };
    std::list<Work>::iterator at;
    State state = State::claiming;
    base::Digest message;  ///< Its key.
    base::Digest key;      ///< Of the mark of its own, once it is needed.
    std::string id, business_key;
    HandlerAnswerPtr answer;
    Done done;
    Group group = 0;
    bool working = false;    ///< One of working_.
    bool again = false;      ///< Of a duplicate.
    bool published = false;  ///< Confirmed, and not marked.
    core::Nonce nonce;
    core::FencingToken token;  ///< 0: no mark is held.
    std::uint32_t late = 0;
    milliseconds wait{0};
    milliseconds busy{0};  ///< Without its group's mark it ends so: who recorded it publishes it.
    runtime::TimerId timer = 0;
};

/// A group that is being published.
struct Results::Members {
    std::size_t joined = 0;
    std::vector<Work*> confirmed;
    runtime::TimerId timer = 0;
};

/// A group's mark that is being written.
struct Results::Mark {
    std::list<Mark>::iterator at;
    std::string name;
    core::Nonce nonce;
    std::vector<Work*> works;
    milliseconds wait{0};
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
                 ConsumerCounters& counters, PublishResult publish)
    : loop_(loop),
      options_(std::move(options)),
      records_(records),
      counters_(counters),
      publish_(std::move(publish)),
      gate_(std::make_shared<Gate>()) {
    SEMEL_ASSERT(publish_ != nullptr, "results go somewhere");
    SEMEL_ASSERT(options_.republish || records_ != nullptr, "marks lie somewhere");
    gate_->owner = this;
    std::memcpy(&nonce_base_, base::random_bytes(sizeof nonce_base_).data(), sizeof nonce_base_);
    if (options_.republish) return;
    names_begin_ = base::hex(base::random_bytes(sizeof(std::uint64_t))) + '-';
    queue_.emplace(
        loop_, *records_,
        [this](const RecordQueue::Tag& tag, const Answered& result) {
            if (tag.of == nullptr) return;  // nobody waits for it
            if (tag.kind == Kind::of_group) return marked(*static_cast<Mark*>(tag.of), result);
            Work& work = *static_cast<Work*>(tag.of);
            if (work.state == Work::State::looking) return looked(work, result);
            if (work.state == Work::State::claiming) return claimed(work, result);
            marked(work, result);
        },
        [this] {
            if (over) over();
        });
}

Results::~Results() {
    {
        const std::lock_guard lock(gate_->mutex);
        gate_->owner = nullptr;
    }
    for (const Work& work : works_) loop_.cancel(work.timer);
    for (const Mark& mark : marks_) loop_.cancel(mark.timer);
    for (const auto& [name, members] : groups_) loop_.cancel(members.timer);
}

Results::Work& Results::begin(const Message& message, HandlerAnswerPtr answer, Done done) {
    SEMEL_ASSERT(answer != nullptr, "there is something to publish");
    Work& work = works_.emplace_front();
    work.at = works_.begin();
    work.message = message.key;
    work.id = message.id;
    if (records_ != nullptr && records_->by_name()) work.business_key = message.business_key;
    work.answer = std::move(answer);
    work.done = std::move(done);
    return work;
}

// ---------------------------------------------------------------- groups

Results::Group Results::join(const Message& message) {
    if (options_.republish) return 0;
    if (open_ == 0) open_ = ++last_group_;
    ++groups_[open_].joined;
    ++working_[message.key];
    return open_;
}

void Results::leave(const Message& message, Group group) {
    if (group == 0) return;
    forget(message.key);
    break_up(group);
}

void Results::forget(const base::Digest& message) {
    const auto found = working_.find(message);
    if (--found->second == 0) working_.erase(found);
}

std::string Results::name_of(Group group) const {
    return group == 0 ? std::string() : names_begin_ + std::to_string(group);
}

void Results::publish_recorded(const Message& message, HandlerAnswerPtr answer, Group group,
                               Done done) {
    Work& work = begin(message, std::move(answer), std::move(done));
    work.group = group;
    work.working = group != 0;
    if (group != 0 && open_ == group) open_ = 0;
    if (const auto members = groups_.find(group);
        members != groups_.end() && members->second.timer == 0) {
        members->second.timer = loop_.at(loop_.now() + group_patience, [this, group] {
            groups_.at(group).timer = 0;
            break_up(group);
        });
    }
    send(work);
}

/// It is confirmed: marked as soon as all of its group are.
void Results::gather(Work& work) {
    const auto found = groups_.find(work.group);
    if (found == groups_.end()) return mark_alone(work);
    work.state = Work::State::gathered;
    found->second.confirmed.push_back(&work);
    if (found->second.confirmed.size() == found->second.joined) mark_group(work.group);
}

/// It will not be marked: what is confirmed of it is marked singly, and so is the rest.
void Results::break_up(Group group) {
    if (group == open_) open_ = 0;
    auto members = groups_.extract(group);
    if (members.empty()) return;
    loop_.cancel(members.mapped().timer);
    for (Work* work : members.mapped().confirmed) mark_alone(*work);
}

void Results::mark_alone(Work& work) {
    work.published = true;
    claim(work);
}

void Results::mark_group(Group group) {
    auto members = groups_.extract(group);
    loop_.cancel(members.mapped().timer);
    Mark& mark = marks_.emplace_front();
    mark.at = marks_.begin();
    mark.name = name_of(group);
    mark.nonce = fresh_nonce();
    mark.works = std::move(members.mapped().confirmed);
    send(mark);
}

RecordStep Results::step_on_group(const std::string& name, core::Operation operation) {
    return {.key = base::sha256("published group " + name),
            .source = "result group",
            .id = name,
            .business_key = {},
            .operation = std::move(operation)};
}

/// That it is there says it: who finds it need not know how far it came.
void Results::send(Mark& mark) {
    core::Acquire made = acquire(base::sha256(mark.name), mark.nonce);
    // Nobody would take it over and complete it: it is cleaned up as requests are.
    made.policy.kind = core::IntentKind::http;
    queue_->push(step_on_group(mark.name, std::move(made)), {&mark, Kind::of_group});
}

void Results::marked(Mark& mark, const Answered& result) {
    if (!result || std::holds_alternative<core::Late>(result->outcome)) {
        mark.timer = loop_.at(loop_.now() + longer(mark.wait), [this, &mark] {
            mark.timer = 0;
            send(mark);
        });
        return;
    }
    if (const auto* granted = std::get_if<core::Granted>(&result->outcome)) {
        core::Answer nothing;
        nothing.http_status = status_answered;
        queue_->push(
            step_on_group(mark.name,
                          core::Complete{granted->token, mark.nonce, std::move(nothing), {}, {}}),
            {nullptr, Kind::of_group});
    }
    const std::vector<Work*> works = std::move(mark.works);
    marks_.erase(mark.at);
    const std::shared_ptr<Gate> gate = gate_;
    for (Work* work : works) {
        finish(*work, std::nullopt);
        if (gate->owner == nullptr) return;
    }
}

// ---------------------------------------------------------------- marks of their own

void Results::publish(const Message& message, HandlerAnswerPtr answer, bool again, Done done) {
    Work& work = begin(message, std::move(answer), std::move(done));
    work.again = again;
    if (options_.republish) return send(work);
    claim(work);
}

void Results::publish_found(const Message& message, HandlerAnswerPtr answer,
                            const core::Record& record, core::StoreTime at, Done done) {
    Work& work = begin(message, std::move(answer), std::move(done));
    work.again = true;
    if (options_.republish) return send(work);
    const std::string group = group_of(record);
    if (group.empty()) return claim(work);
    // Its owner marks it within the lease, or has died. What this process has recorded it publishes
    // now, or does not any more.
    const bool mine = record.owner.id == options_.owner.id;
    const core::StoreTime until = record.completed + options_.lease;
    if (mine ? working_.contains(message.key) : at < until) {
        const auto patient = busy_min * (std::int64_t{1} << std::min(message.runs, 10U));
        work.busy = std::clamp(patient, busy_min, std::max(options_.lease, busy_min));
    }
    work.state = Work::State::looking;
    queue_->push(step_on_group(group, core::Get{}), {&work, Kind::of_one});
}

void Results::looked(Work& work, const Answered& result) {
    if (!result) return finish(work, Ill{records_->name() + ": " + result.error().detail});
    if (std::get<core::Found>(result->outcome).record != nullptr) return finish(work, std::nullopt);
    if (work.busy.count() != 0) return finish(work, Busy{work.busy});
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

core::Acquire Results::acquire(const base::Digest& key, core::Nonce nonce) const {
    core::Acquire acquire;
    acquire.fingerprint.raw = key;
    acquire.fingerprint.canonical = key;
    acquire.owner = options_.owner;
    acquire.nonce = nonce;
    acquire.lease = options_.lease;
    acquire.not_after =
        queue_->latest_now().value_or(core::StoreTime{loop_.clock().wall_us()}) + claim_patience;
    acquire.policy.kind = core::IntentKind::message;
    acquire.policy.on_unknown = core::OnUnknown::rerun;
    acquire.policy.retention_completed = options_.retention;
    acquire.policy.retention_failed = options_.retention;
    acquire.policy.retention_dead = options_.retention;
    acquire.label = "result";
    return acquire;
}

void Results::claim(Work& work) {
    if (work.key.empty()) {
        std::string name = "published";
        name += work.message.view();
        name += base::sha256(work.answer->body).view();
        work.key = base::sha256(name);
        work.nonce = fresh_nonce();
    }
    work.state = Work::State::claiming;
    queue_->push(step_on_mark(work, acquire(work.key, work.nonce)), {&work, Kind::of_one});
}

void Results::claimed(Work& work, const Answered& result) {
    if (!result) {
        if (work.published) return claim_later(work);
        if (result.error().applied != base::Applied::no) give_back(work);
        return finish(work, Ill{records_->name() + ": " + result.error().detail});
    }
    const core::StoreOutcome& outcome = result->outcome;
    if (const auto* granted = std::get_if<core::Granted>(&outcome)) {
        work.token = granted->token;
        return work.published ? mark(work) : send(work);
    }
    if (std::holds_alternative<core::Late>(outcome)) {
        if (work.published) return claim_later(work);
        if (++work.late <= late_max) return claim(work);
        return finish(work, Ill{records_->name() +
                                ": its clock was past the time limit of each claim: check its "
                                "clock"});
    }
    // Who holds the mark publishes the same once more, and marks it.
    if (work.published) return finish(work, std::nullopt);
    if (const auto* replay = std::get_if<core::Replay>(&outcome);
        replay != nullptr && replay->record->status == core::Status::completed)
        return finish(work, std::nullopt);
    if (const auto* flight = std::get_if<core::InFlight>(&outcome))
        return finish(work, Busy{std::clamp(flight->remaining, busy_min, options_.lease)});
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
    if (over) over();
}

void Results::confirmed(Work& work, base::Result<void> result) {
    if (result) {
        base::fault_point("consumer.publish.after");
        ++counters_.results_published;
        if (work.again) ++counters_.results_again;
        if (work.group != 0) return gather(work);
        if (work.token.value == 0) return finish(work, std::nullopt);
        return mark(work);
    }
    ++counters_.results_failed;
    if (work.token.value != 0) give_back(work);
    break_up(work.group);
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
    work.state = Work::State::marking;
    core::Answer nothing;
    nothing.http_status = status_answered;
    queue_->push(
        step_on_mark(work, core::Complete{work.token, work.nonce, std::move(nothing), {}, {}}),
        {&work, Kind::of_one});
}

void Results::marked(Work& work, const Answered& result) {
    // Fenced: another took the claim over and publishes the same once more, or the store has
    // forgotten it. Published it is.
    if (result) return finish(work, std::nullopt);
    work.timer = loop_.at(loop_.now() + longer(work.wait), [this, &work] {
        work.timer = 0;
        mark(work);
    });
}

void Results::claim_later(Work& work) {
    work.timer = loop_.at(loop_.now() + longer(work.wait), [this, &work] {
        work.timer = 0;
        claim(work);
    });
}

/// If it does not arrive, the lease runs out.
void Results::give_back(const Work& work) {
    if (!queue_) return;
    queue_->push(step_on_mark(work, core::Release{work.token, work.nonce}),
                 {nullptr, Kind::of_one});
}

void Results::finish(Work& work, std::optional<Verdict> verdict) {
    const Done done = std::move(work.done);
    if (work.working) forget(work.message);
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

core::Answer recorded_answer(const HandlerAnswerPtr& answer, std::string group) {
    core::Answer out;
    out.http_status = status_answered;
    if (!answer) return out;
    out.content_type =
        answer->content_type.empty() ? std::string(plain_content_type) : answer->content_type;
    out.headers = answer->headers;
    if (!group.empty()) out.headers.emplace_back(group_header, std::move(group));
    out.body = std::shared_ptr<const std::string>(answer, &answer->body);
    out.body_bytes = answer->body.size();
    out.body_digest = base::sha256(answer->body);
    return out;
}

HandlerAnswerPtr answer_of(const core::Record& record) {
    // Each recorded answer has a content type, and nothing else that completes a message has one.
    if (!record.answer || record.answer->content_type.empty()) return nullptr;
    if (answer_is_gone(record)) return nullptr;
    auto out = std::make_shared<HandlerAnswer>();
    out->content_type = record.answer->content_type;
    out->headers = record.answer->headers;
    if (!group_of(record).empty()) out->headers.pop_back();
    if (record.answer->body) out->body = *record.answer->body;
    return out;
}

}  // namespace semel::consumer
