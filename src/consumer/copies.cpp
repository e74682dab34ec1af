#include "consumer/copies.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "base/assert.hpp"
#include "brokers/delayed.hpp"
#include "deadletter/letter.hpp"

namespace semel::consumer {

namespace {

using brokers::OutgoingHeader;

/// What RabbitMQ writes for one delivery.
constexpr std::array<std::string_view, 2> of_one_delivery{"x-delivery-count", "x-acquired-count"};
constexpr std::string_view original = "semel-original-";

/// What RabbitMQ writes when it moves a message from queue to queue, also when a delay is over. As
/// text, as which it arrives, the broker could not go on with it.
bool of_a_move(std::string_view name) {
    return name == "x-death" || name.starts_with("x-first-death-") ||
           name.starts_with("x-last-death-");
}

std::vector<OutgoingHeader> kept(const brokers::Delivery& delivery, bool kafka) {
    const bool is_copy =
        std::any_of(delivery.headers.begin(), delivery.headers.end(),
                    [](const brokers::Header& one) { return one.name == brokers::due_header; });
    std::vector<OutgoingHeader> out;
    out.reserve(delivery.headers.size() + 8);
    for (const brokers::Header& header : delivery.headers) {
        if (header.name == brokers::due_header || header.name == brokers::copy_of_header) continue;
        OutgoingHeader copy{std::string(header.name), std::nullopt};
        if (header.value) copy.value = std::string(*header.value);
        if (!kafka) {
            if (std::find(of_one_delivery.begin(), of_one_delivery.end(), header.name) !=
                of_one_delivery.end())
                continue;
            if (of_a_move(header.name) && is_copy) continue;
            if (of_a_move(header.name) || deadletter::steers(header.name))
                copy.name.insert(0, original);
        }
        out.push_back(std::move(copy));
    }
    return out;
}

}  // namespace

std::optional<std::size_t> waits_at_broker(const CopyRules& rules, const Retry& retry) {
    SEMEL_ASSERT(!rules.delays.empty(), "copies wait for one of the delays");
    if (retry.charged) return retry.step;
    if (retry.delay <= rules.in_hand_max) return std::nullopt;
    std::size_t best = 0;
    for (std::size_t i = 1; i < rules.delays.size(); ++i) {
        const milliseconds now = rules.delays[best];
        const milliseconds other = rules.delays[i];
        const bool enough = other >= retry.delay;
        if (now < retry.delay ? other > now : enough && other < now) best = i;
    }
    return best;
}

brokers::Outgoing make_copy(const brokers::Delivery& delivery, const CopyRules& rules,
                            std::size_t delay, std::int64_t due_ms) {
    brokers::Outgoing copy;
    copy.topic = rules.targets.at(delivery.partition().topic).at(delay);
    if (rules.kafka && delivery.key) copy.key = std::string(*delivery.key);
    if (delivery.value) copy.value = std::string(*delivery.value);
    copy.headers = kept(delivery, rules.kafka);
    deadletter::add_origin(copy.headers, delivery, rules.kafka);
    if (rules.kafka) {
        const brokers::Position here{.partition = delivery.partition(),
                                     .offset = delivery.position()};
        // Only a copy of ours lies in a topic whose name is among the targets.
        const auto& names = rules.targets.at(delivery.partition().topic);
        const bool is_copy =
            std::find(names.begin(), names.end(), delivery.partition().topic) != names.end();
        const auto first = is_copy ? brokers::copied_from(delivery) : std::nullopt;
        copy.headers.push_back(
            {std::string(brokers::copy_of_header), brokers::in_words(first.value_or(here))});
    } else if (delivery.properties) {
        copy.properties = deadletter::kept_properties(delivery, copy.headers);
        copy.timestamp_ms = delivery.timestamp_ms;
    }
    copy.headers.push_back({std::string(brokers::due_header), std::to_string(due_ms)});
    return copy;
}

CopyOutlet::CopyOutlet(brokers::Publisher& publisher, CopyRules rules)
    : publisher_(publisher), rules_(std::move(rules)) {}

const std::string& CopyOutlet::target(const brokers::Delivery& delivery, std::size_t delay) const {
    return rules_.targets.at(delivery.partition().topic).at(delay);
}

void CopyOutlet::publish(const brokers::Delivery& delivery, std::size_t delay, std::int64_t due_ms,
                         std::function<void(base::Result<void>)> done) {
    publisher_.publish(make_copy(delivery, rules_, delay, due_ms),
                       [done = std::move(done)](base::Result<brokers::PublishedAt> at) {
                           if (at) {
                               done({});
                           } else {
                               done(std::move(at.error()));
                           }
                       });
}

}  // namespace semel::consumer
