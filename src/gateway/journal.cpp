#include "gateway/journal.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "base/assert.hpp"

namespace semel::gateway {

Journal::Journal(std::string spill_path) : spill_path_(std::move(spill_path)) {}

Journal::~Journal() {
    if (spill_fd_ >= 0) ::close(spill_fd_);
}

void Journal::set_head(AnswerHead head, bool streaming) {
    const std::lock_guard lock(mutex_);
    SEMEL_ASSERT(!view_.has_head, "an attempt has one head");
    head_ = std::move(head);
    view_.has_head = true;
    view_.streaming = streaming;
}

void Journal::set_streaming() {
    const std::lock_guard lock(mutex_);
    view_.streaming = true;
}

bool Journal::spill(std::string_view bytes) {
    if (spill_fd_ < 0) {
        std::string name = spill_path_ + "/semel-journal-XXXXXX";
        spill_fd_ = ::mkostemp(name.data(), O_CLOEXEC);
        if (spill_fd_ < 0) return false;
        ::unlink(name.c_str());  // nothing is left behind, however the process ends
    }
    while (!bytes.empty()) {
        const ssize_t n =
            ::pwrite(spill_fd_, bytes.data(), bytes.size(), static_cast<off_t>(spilled_));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        spilled_ += static_cast<std::uint64_t>(n);
        bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
}

bool Journal::append(std::string_view bytes) {
    const std::lock_guard lock(mutex_);
    SEMEL_ASSERT(held_ == 0, "what is held are the last bytes");
    if (!store_locked(bytes)) return false;
    view_.bytes += bytes.size();
    return true;
}

bool Journal::append_held(std::string_view bytes) {
    const std::lock_guard lock(mutex_);
    if (!store_locked(bytes)) return false;
    held_ += bytes.size();
    return true;
}

void Journal::drop_held() {
    const std::lock_guard lock(mutex_);
    held_ = 0;
}

std::uint64_t Journal::stored() const {
    const std::lock_guard lock(mutex_);
    return view_.bytes + held_;
}

bool Journal::store_locked(std::string_view bytes) {
    if (view_.end != End::open) return false;
    if (spill_fd_ < 0 && memory_.size() + bytes.size() <= journal_memory_max_bytes) {
        memory_ += bytes;
    } else if (!spill(bytes)) {
        view_.end = End::cut;
        return false;
    }
    return true;
}

void Journal::finish(End end, std::string_view last, bool record_pending, core::StoreTime expires) {
    const std::lock_guard lock(mutex_);
    if (view_.end != End::open) return;
    view_.last_at = view_.bytes;
    if (!last.empty() && !store_locked(last)) return;
    view_.bytes += held_ + last.size();
    held_ = 0;
    view_.end = end;
    view_.record_pending = record_pending;
    view_.expires = expires;
    if (end == End::whole && spill_fd_ < 0) {
        body_ = std::make_shared<const std::string>(std::move(memory_));
        memory_.clear();
    }
}

Journal::View Journal::view() const {
    const std::lock_guard lock(mutex_);
    return view_;
}

void Journal::read(std::uint64_t offset, std::size_t max, std::string& out) const {
    out.clear();
    int fd = -1;
    std::size_t wanted = 0;
    std::uint64_t in_memory = 0;
    {
        const std::lock_guard lock(mutex_);
        if (offset >= view_.bytes) return;
        wanted = static_cast<std::size_t>(std::min<std::uint64_t>(max, view_.bytes - offset));
        const std::string& memory = body_ ? *body_ : memory_;
        in_memory = memory.size();
        if (offset < in_memory) {
            out = memory.substr(static_cast<std::size_t>(offset), wanted);
            return;
        }
        fd = spill_fd_;
    }
    // What is in the file never changes, so it is read without the lock.
    out.resize(wanted);
    const ssize_t n = ::pread(fd, out.data(), wanted, static_cast<off_t>(offset - in_memory));
    out.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
}

std::shared_ptr<const std::string> Journal::body() const {
    const std::lock_guard lock(mutex_);
    return body_;
}

}  // namespace semel::gateway
