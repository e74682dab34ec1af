// semel consumer reset: moves the positions of a Kafka consumer that does not run.
#include <algorithm>
#include <cstdio>

#include "base/time.hpp"
#include "cli/cli.hpp"
#include "cli/consumer_outlook.hpp"
#include "inbox/names.hpp"

namespace semel::cli {

namespace {

int complain(int code, const std::string& why) {
    std::fprintf(stderr, "semel consumer reset: %s\n", why.c_str());
    return code;
}

/// The position that strategy transaction keeps beside its effects. A partition that it has never
/// had is left alone: the group's position is taken over at its first start.
base::Result<void> set_position(sql::Executor& executor, const config::ConsumerConfig& consumer,
                                const PositionToSet& position) {
    const inbox::Tables tables(executor.dialect(), {.schema = consumer.database->schema});
    inbox::StatementBuilder statement(executor.dialect());
    statement.text("UPDATE " + tables.offsets + " SET next_offset = ").number(position.to);
    statement.text(", topic_id = NULL");  // it is of the topic that there is now
    statement.text(" WHERE scope = ").label(consumer.scope);
    statement.text(" AND topic = ").label(position.topic);
    statement.text(" AND ").text(inbox::partition_column(executor.dialect()));
    statement.text(" = ").number(position.partition);
    auto done = executor.run(statement.finish());
    if (auto* problem = std::get_if<sql::Problem>(&done)) return std::move(problem->error);
    return {};
}

bool is_read(const config::ConsumerConfig& consumer, const std::string& topic) {
    return std::ranges::any_of(consumer.kafka->topics, [&topic](const std::string& one) {
        return config::takes_in(one, topic);
    });
}

std::string in_a_row(const std::vector<std::string>& names) {
    std::string out;
    for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
    return out;
}

void print(const std::vector<PositionToSet>& positions) {
    std::printf("%-32s  %9s  %12s  %12s  %12s\n", "TOPIC", "PARTITION", "COMMITTED", "TO", "END");
    for (const PositionToSet& one : positions) {
        const std::string committed = one.committed < 0 ? "-" : std::to_string(one.committed);
        std::printf("%-32s  %9d  %12s  %12lld  %12lld\n", one.topic.c_str(), one.partition,
                    committed.c_str(), static_cast<long long>(one.to),
                    static_cast<long long>(one.end));
    }
    std::fflush(stdout);
}

}  // namespace

int consumer_reset(const ConsumerResetOptions& given, const Leaves& leaves) {
    ConsumerResetOptions options = given;
    const auto target = reset_target(options.to, base::system_clocks().wall_us() / 1000);
    if (!target) return complain(exit_usage, target.error().detail);
    options.target = *target;
    const auto config = config::load(options.config);
    if (!config) return complain(exit_usage, config.error().detail);
    const config::ConsumerConfig* consumer = nullptr;
    for (const config::ConsumerConfig& one : config->consumers) {
        if (one.name == options.name) consumer = &one;
    }
    if (consumer == nullptr)
        return complain(exit_not_found,
                        "there is no consumer " + options.name + " in " + options.config);
    if (!consumer->kafka)
        return complain(exit_usage, "a queue of RabbitMQ has no positions that could be moved");
    const std::vector<std::string> copies = config::all_copy_targets(*consumer);
    const bool of_copies = std::ranges::find(copies, options.topic) != copies.end();
    if (!options.topic.empty() && !of_copies && !is_read(*consumer, options.topic)) {
        std::vector<std::string> known = consumer->kafka->topics;
        known.insert(known.end(), copies.begin(), copies.end());
        return complain(exit_usage, "the consumer does not read the topic " + options.topic +
                                        "; it reads " + in_a_row(known));
    }
    const auto planned = leaves.consumers.plan_reset(*consumer, options);
    if (!planned) {
        const bool wrong = planned.error().code == base::ErrorCode::invalid_argument;
        return complain(wrong ? exit_usage : exit_failed, planned.error().detail);
    }
    if (options.target.kind == ResetTarget::Kind::time)
        std::fprintf(stderr,
                     "semel consumer reset: to the first message of %s or later, and to the end "
                     "where there is none\n",
                     time_in_words(options.target.at).c_str());
    print(*planned);
    std::fprintf(stderr,
                 "semel consumer reset: what is done stays known (dedup.retention), so messages "
                 "that are read again have no second effect while it does; what is passed over is "
                 "not read any more\n");
    if (of_copies) {
        std::fprintf(stderr,
                     "semel consumer reset: a copy is all that is left of its message: one that is "
                     "passed over never runs\n");
    } else if (!copies.empty()) {
        std::fprintf(stderr,
                     "semel consumer reset: copies that wait in %s are left alone: each runs when "
                     "it is due, or is known by its id to be done; --topic moves the position in "
                     "such a topic\n",
                     in_a_row(copies).c_str());
    }
    if (!options.yes) return complain(exit_ok, "nothing was changed; --yes does it");
    if (consumer->strategy == config::ConsumerStrategy::transaction) {
        // First: where the two differ, the effects' own position is the one that counts.
        auto connected = leaves.consumers.connect(*consumer->database)();
        if (auto* problem = std::get_if<sql::Problem>(&connected))
            return complain(exit_failed, problem->error.detail);
        for (const PositionToSet& position : *planned) {
            if (auto set = set_position(*std::get<0>(connected), *consumer, position); !set)
                return complain(exit_failed, set.error().detail);
        }
    }
    if (auto done = leaves.consumers.commit_reset(*consumer, *planned); !done)
        return complain(exit_failed, done.error().detail + "; repeat it");
    return complain(exit_ok, "done; the consumer begins there at its next start");
}

}  // namespace semel::cli
