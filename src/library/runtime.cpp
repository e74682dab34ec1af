#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <utility>

#include "base/fault_point.hpp"
#include "cli/callbacks.hpp"
#include "config/config.hpp"
#include "leaves/leaves.hpp"
#include "library/handlers.hpp"
#include "library/process.hpp"
#include "semel/semel.hpp"
#include "telemetry/log.hpp"

namespace semel {

namespace {

/// SIGTERM and SIGINT come to a descriptor of this thread's, and SIGPIPE ends nothing, while this
/// lives.
class Signals {
  public:
    Signals() {
        sigset_t ending;
        sigemptyset(&ending);
        sigaddset(&ending, SIGTERM);
        sigaddset(&ending, SIGINT);
        pthread_sigmask(SIG_BLOCK, &ending, &before_);
        descriptor_ = ::signalfd(-1, &ending, SFD_CLOEXEC);
        struct sigaction now{};
        if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
            (void)std::signal(SIGPIPE, SIG_IGN);
    }
    ~Signals() {
        give_back();
        if (descriptor_ >= 0) ::close(descriptor_);
    }
    Signals(const Signals&) = delete;
    Signals& operator=(const Signals&) = delete;

    [[nodiscard]] int descriptor() const { return descriptor_; }
    /// Takes the one that woke us.
    void take() const {
        signalfd_siginfo what{};
        (void)!::read(descriptor_, &what, sizeof what);
    }
    /// From now on they do what they did before: a second one ends the process at once.
    void give_back() {
        if (std::exchange(given_back_, true)) return;
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }

  private:
    sigset_t before_{};
    int descriptor_ = -1;
    bool given_back_ = false;
};

int refused(int code, const std::string& reason) {
    log::error("runtime.refused", {{"reason", reason}});
    return code;
}

}  // namespace

std::string version() { return SEMEL_VERSION; }

struct Runtime::Impl {
    std::string config_path;
    cli::Callbacks callbacks;
    int stop = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    bool ran = false;

    explicit Impl(std::string path) : config_path(std::move(path)) {}
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;
    ~Impl() {
        if (stop >= 0) ::close(stop);
    }
};

Runtime::Runtime(std::string config_path) : impl_(std::make_unique<Impl>(std::move(config_path))) {}
Runtime::~Runtime() = default;

void Runtime::on(const std::string& consumer, Handler handler) {
    impl_->callbacks.functions[consumer] = library::callback_of(std::move(handler));
}

void Runtime::on_transaction(const std::string& consumer, TransactionHandler handler,
                             bool batchable) {
    impl_->callbacks.transactions[consumer] = library::callback_of(std::move(handler), batchable);
}

int Runtime::run() {
    if (std::exchange(impl_->ran, true))
        return refused(cli::exit_usage, "this Runtime has run before: make another");
    const auto config = config::load(impl_->config_path);
    if (!config) return refused(cli::exit_usage, config.error().detail);
    const cli::Leaves leaves = semel::leaves();
    const auto checked = library::check(*config, impl_->config_path, leaves, impl_->callbacks);
    if (!checked) return refused(cli::exit_usage, checked.error().detail);
    for (const std::string& warning : config->warnings)
        log::warn("runtime.notice", {{"notice", warning}});

    if (const char* points = std::getenv("SEMEL_FAULT_POINTS"); points != nullptr) {  // for tests
        std::string problem;
        if (!base::arm_fault_points(points, problem))
            return refused(cli::exit_usage, "SEMEL_FAULT_POINTS: " + problem);
    }
    Signals signals;  // before any thread of ours, which inherit that these are blocked
    if (impl_->stop < 0 || signals.descriptor() < 0)
        return refused(cli::exit_failed,
                       "no file descriptors are left: raise the limit (ulimit -n)");
    library::Process process(*config, impl_->config_path, leaves);
    if (const auto opened = process.open(impl_->callbacks); !opened) {
        signals.give_back();
        process.stop();
        return refused(cli::exit_failed, opened.error().detail);
    }
    process.start();
    log::info("runtime.ready", {{"what", process.describe()}});
    std::array<pollfd, 2> wake{{{.fd = signals.descriptor(), .events = POLLIN, .revents = 0},
                                {.fd = impl_->stop, .events = POLLIN, .revents = 0}}};
    while (::poll(wake.data(), wake.size(), -1) < 0) {  // interrupted by another signal's handler
    }
    if (wake[0].revents != 0) signals.take();
    signals.give_back();
    log::info("runtime.stopping", {});
    process.stop();
    log::info("runtime.stopped", {});
    return cli::exit_ok;
}

void Runtime::stop() { (void)::eventfd_write(impl_->stop, 1); }

}  // namespace semel
