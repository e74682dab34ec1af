#include "consumer/observer.hpp"

#include <algorithm>
#include <utility>

#include "telemetry/log.hpp"

namespace semel::consumer {

namespace {

/// Unsettled messages that the source may have out; all are settled as soon as they were seen.
constexpr std::size_t window = 10'000;
constexpr std::size_t sentences_kept = 20;
constexpr milliseconds leave_within{5000};

std::string name_of_position(const std::string& topic, std::int32_t partition,
                             std::int64_t offset) {
    return topic + "-" + std::to_string(partition) + " at " + std::to_string(offset);
}

Observed of_class(DeadClass why) {
    if (why == DeadClass::missing_id) return Observed::missing_id;
    return why == DeadClass::tombstone ? Observed::tombstone : Observed::undecodable;
}

}  // namespace

const char* name_of(Observed what) {
    switch (what) {
        case Observed::first:
            return "first";
        case Observed::duplicate:
            return "duplicate";
        case Observed::mismatch:
            return "mismatch";
        case Observed::missing_id:
            return "missing_id";
        case Observed::undecodable:
            return "undecodable";
        case Observed::tombstone:
            return "tombstone";
        case Observed::skipped:
            return "skipped";
    }
    return "";
}

Observer::Observer(ObserverOptions options, brokers::Source& source, ObserverCounters& counters)
    : options_(std::move(options)),
      source_(source),
      counters_(counters),
      identity_(options_.identity),
      seen_(options_.ids_max) {}

Observer::~Observer() { stop(); }

std::string Observer::promise() {
    return "it only looks: messages are read beside the group and counted; nothing is claimed, "
           "handled, written or committed";
}

base::Result<void> Observer::start() {
    log::info(
        "consumer.started",
        {{"consumer", options_.name}, {"source", source_.traits().name}, {"promise", promise()}});
    show("running", {});
    auto begun = source_.start(*this);
    if (!begun) show("stopped", begun.error().detail);
    return begun;
}

void Observer::pause(std::string reason) {
    if (drained_ || stopped_) return;
    source_.window(0);
    show("paused", std::move(reason));
}

void Observer::resume() {
    if (drained_ || stopped_) return;
    source_.window(window);
    show("running", {});
}

void Observer::drain() {
    drained_ = true;
    source_.window(0);
    show("stopped", "drained on request; there is no membership to hand over");
}

void Observer::stop() {
    if (stopped_.exchange(true)) return;
    source_.stop(leave_within);
    show("stopped", "it was told to stop");
}

ConsumerState Observer::state() const {
    ConsumerState out;
    out.name = options_.name;
    out.group = options_.group;
    out.source = source_.traits().name;
    out.promise = promise();
    out.partitions = source_.state();
    const std::lock_guard lock(mutex_);
    out.condition = condition_;
    out.reason = reason_;
    for (const auto& [about, sentence] : told_) out.alarms.push_back(sentence);
    return out;
}

void Observer::assigned(const std::vector<brokers::AssignmentPtr>& which) {
    for (const brokers::AssignmentPtr& assignment : which) source_.begin(assignment);
}

void Observer::delivered(std::vector<brokers::Delivery> messages) {
    std::vector<brokers::Receipt> seen;
    seen.reserve(messages.size());
    for (brokers::Delivery& delivery : messages) {
        seen.push_back(delivery.receipt);
        look_at(std::move(delivery));
    }
    counters_.forgotten.store(seen_.forgotten(), std::memory_order_relaxed);
    source_.settle(seen);
}

void Observer::look_at(brokers::Delivery&& delivery) {
    const std::string topic = delivery.partition().topic;
    const std::int32_t partition = delivery.partition().number;
    const std::int64_t offset = delivery.position();
    const auto here = [&] { return name_of_position(topic, partition, offset); };
    brokers::Delivery rest;
    const Identified what = identity_.identify(std::move(delivery), rest);
    if (const auto* skipped = std::get_if<Skipped>(&what)) {
        count(Observed::skipped);
        tell("skipped", "skipped, lately " + here() + ": " + skipped->rule);
        return;
    }
    if (const auto* unreadable = std::get_if<Unreadable>(&what)) {
        const Observed kind = of_class(unreadable->why);
        count(kind);
        tell(name_of(kind),
             std::string(name_of(kind)) + ", lately " + here() + ": " + unreadable->reason);
        return;
    }
    const Message& message = *std::get<std::unique_ptr<Message>>(what);
    counters_.ids.at(static_cast<std::size_t>(message.id_from))
        .fetch_add(1, std::memory_order_relaxed);
    const auto before = seen_.see(message.key, message.fingerprint, partition, offset);
    if (!before) return count(Observed::first);
    const Observed kind = before->same ? Observed::duplicate : Observed::mismatch;
    count(kind);
    // Its own topic or another one with the same source of ids; ids themselves may be secret.
    tell(name_of(kind), std::string(name_of(kind)) + ", lately " + here() +
                            ": its id was on a message of partition " +
                            std::to_string(before->partition) + " at " +
                            std::to_string(before->offset) +
                            (before->same ? "" : ", whose payload is another"));
}

void Observer::revoked(const std::vector<brokers::AssignmentPtr>& which, base::SteadyTime) {
    for (const brokers::AssignmentPtr& assignment : which) source_.drained(assignment);
}

void Observer::released(const std::vector<brokers::AssignmentPtr>&) {}
void Observer::lost(const std::vector<brokers::AssignmentPtr>&) {}

void Observer::problem(const brokers::Problem& what) {
    using Kind = brokers::ProblemKind;
    if (what.kind == Kind::notice) {
        log::info("consumer.broker", {{"consumer", options_.name}, {"text", what.text}});
        return;
    }
    if (what.kind == Kind::reachable || what.kind == Kind::unblocked) {
        const std::lock_guard lock(mutex_);
        std::erase_if(told_, [](const auto& one) { return one.first == "broker"; });
        return;
    }
    log::warn("consumer.alarm", {{"consumer", options_.name}, {"text", what.text}});
    if (what.kind == Kind::fatal) show("stopped", what.text);
    const bool broker = what.kind == Kind::unreachable || what.kind == Kind::blocked;
    tell(broker ? "broker"
                : "problem " + std::to_string(static_cast<int>(what.kind)) +
                      (what.partition ? " " + what.partition->topic + "-" +
                                            std::to_string(what.partition->number)
                                      : ""),
         what.text);
}

void Observer::show(std::string condition, std::string reason) {
    const std::lock_guard lock(mutex_);
    condition_ = std::move(condition);
    reason_ = std::move(reason);
}

void Observer::tell(const std::string& about, std::string sentence) {
    const std::lock_guard lock(mutex_);
    std::erase_if(told_, [&](const auto& one) { return one.first == about; });
    told_.emplace_back(about, std::move(sentence));
    if (told_.size() > sentences_kept) told_.erase(told_.begin());
}

}  // namespace semel::consumer
