// A member of a group in a process of its own, to be killed and frozen by a test. Settles messages
// whose value begins with "ok"; leaves others unfinished, and tries to settle them once they were
// lost. Writes what happens to standard output, a line each.
//   kafka_member BROKERS TOPIC GROUP ASSIGNOR
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>

#include "brokers/kafka/kafka.hpp"

namespace {

using namespace semel::brokers;

class Printer final : public Listener {
  public:
    explicit Printer(Source& source) : source_(source) {}
    void assigned(const std::vector<AssignmentPtr>& which) override {
        for (const AssignmentPtr& one : which) {
            std::printf("assigned %d\n", one->partition().number);
            source_.begin(one);
        }
        std::fflush(stdout);
    }
    void delivered(std::vector<Delivery> messages) override {
        for (const Delivery& message : messages) {
            std::printf("delivered %d %lld\n", message.partition().number,
                        static_cast<long long>(message.position()));
            if (message.value && message.value->starts_with("ok")) {
                source_.settle(message.receipt);
            } else {
                unfinished_.push_back(message.receipt);
            }
        }
        std::fflush(stdout);
    }
    void revoked(const std::vector<AssignmentPtr>& which, semel::base::SteadyTime) override {
        for (const AssignmentPtr& one : which) source_.drained(one);
    }
    void released(const std::vector<AssignmentPtr>&) override { std::puts("released"); }
    void lost(const std::vector<AssignmentPtr>& which) override {
        std::printf("lost %zu, settled late %zu\n", which.size(), source_.settle(unfinished_));
        std::fflush(stdout);
    }
    void problem(const Problem& what) override {
        std::fprintf(stderr, "problem: %s\n", what.text.c_str());
    }

  private:
    Source& source_;
    std::vector<Receipt> unfinished_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) return 2;
    auto source = kafka::make_source({.brokers = argv[1],
                                      .topics = {argv[2]},
                                      .group = argv[3],
                                      .properties = {{"session.timeout.ms", "1500"},
                                                     {"heartbeat.interval.ms", "300"},
                                                     {"partition.assignment.strategy", argv[4]}},
                                      .commit_interval = std::chrono::milliseconds{50}});
    if (!source) {
        std::fprintf(stderr, "%s\n", source.error().detail.c_str());
        return 1;
    }
    Printer printer(**source);
    if (!(*source)->start(printer)) return 1;
    ::poll(nullptr, 0, -1);  // until it is killed
}
