#include "base/time.hpp"

namespace semel::base {
namespace {

class SystemClocks final : public Clock {
  public:
    [[nodiscard]] SteadyTime steady() const override { return std::chrono::steady_clock::now(); }
    [[nodiscard]] std::int64_t wall_us() const override {
        return std::chrono::duration_cast<std::chrono::microseconds>(
                   std::chrono::system_clock::now().time_since_epoch())
            .count();
    }
};

}  // namespace

Clock& system_clocks() {
    static SystemClocks clocks;
    return clocks;
}

}  // namespace semel::base
