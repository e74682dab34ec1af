// The contract suite on a Cluster of three while the slot of the tests' session is moved from node
// to node without a pause.
#include <atomic>
#include <thread>

#include "contract/redis_factory.hpp"

namespace semel::contract {
namespace {

class MovingCluster {
  public:
    MovingCluster() : mover_([this] { move(); }) {}
    ~MovingCluster() {
        ended_ = true;
        mover_.join();
        if (moves_ == 0 || refused_)
            ADD_FAILURE() << "the slot was moved " << moves_ << " times, then the Cluster refused";
    }
    [[nodiscard]] std::string url() { return cluster_.node(0).url(); }

  private:
    void move() {
        // The bucket that store_contract.cpp's key() puts everything into.
        const std::uint16_t bucket = core::bucket_of(base::sha256("key session"));
        std::string tag = std::to_string(bucket);
        tag.insert(0, 4 - tag.size(), '0');
        const std::uint16_t slot = stores::redis::slot_of("{b" + tag + "}");
        std::size_t owner = cluster_.owner_of(slot);
        while (!ended_) {
            const std::size_t next = (owner + 1) % cluster_.size();
            if (!cluster_.migrate(slot, owner, next)) {
                refused_ = true;
                return;
            }
            owner = next;
            ++moves_;
        }
    }

    support::RedisCluster cluster_;
    std::atomic<bool> ended_{false};
    std::atomic<int> moves_{0};
    std::atomic<bool> refused_{false};
    std::thread mover_;
};

std::string moving_cluster() {
    static MovingCluster cluster;
    return cluster.url();
}

INSTANTIATE_TEST_SUITE_P(RedisCluster, StoreContract,
                         testing::Values(StoreFactory{
                             "RedisCluster",
                             [] { return std::make_unique<RedisPlace>(moving_cluster(), true); },
                             true, false, true}),
                         test_name);

}  // namespace
}  // namespace semel::contract
