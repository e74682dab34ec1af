// Error and Result<T>: how an operating failure (not a normal answer) is carried. std::expected is
// C++23.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <variant>

#include "base/assert.hpp"

namespace semel::base {

/// What kind of operating failure it was. Each maps to one HTTP status in gateway/problem.
enum class ErrorCode {
    store_unavailable,  ///< The store cannot be asked, or did not answer in time.
    store_full,         ///< The store's disk or memory is full; reads still work.
    store_corrupt,      ///< The store's files contradict themselves; nothing is served from them.
    store_locked,       ///< Another process holds the data directory.
    store_version,      ///< The data directory was written by a newer version.
    too_late,           ///< The store saw the operation after its not_after time and refused it.
    invalid_argument,   ///< The caller broke a documented limit.
    io,                 ///< A file or socket failed.
    stopping,           ///< The process is shutting down.
};

/// Whether the store's step took effect. Never guessed: after a lost connection it is `unknown`.
enum class Applied { no, yes, unknown };

struct Error {
    ErrorCode code = ErrorCode::io;
    Applied applied = Applied::no;
    std::chrono::milliseconds retry_after{0};  ///< 0: no advice.
    std::string detail;                        ///< Says what happened, to what, and what to do.
};

/// A value or an Error. Member names are std::expected's.
template <class T>
class [[nodiscard]] Result {
  public:
    Result(T value)
        : data_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit on purpose
    Result(Error error) : data_(std::in_place_index<1>, std::move(error)) {}  // NOLINT

    [[nodiscard]] bool has_value() const noexcept { return data_.index() == 0; }
    explicit operator bool() const noexcept { return has_value(); }
    T& value() & {
        SEMEL_ASSERT(has_value(), "value() of a Result that holds an Error");
        return *std::get_if<0>(&data_);
    }
    const T& value() const& {
        SEMEL_ASSERT(has_value(), "value() of a Result that holds an Error");
        return *std::get_if<0>(&data_);
    }
    T&& value() && { return std::move(value()); }
    T& operator*() & { return value(); }
    const T& operator*() const& { return value(); }
    T&& operator*() && { return std::move(value()); }
    T* operator->() { return &value(); }
    const T* operator->() const { return &value(); }
    Error& error() & {
        SEMEL_ASSERT(!has_value(), "error() of a Result that holds a value");
        return *std::get_if<1>(&data_);
    }
    const Error& error() const& {
        SEMEL_ASSERT(!has_value(), "error() of a Result that holds a value");
        return *std::get_if<1>(&data_);
    }

  private:
    std::variant<T, Error> data_;
};

template <>
class [[nodiscard]] Result<void> {
  public:
    Result() = default;
    Result(Error error) : error_(std::move(error)), failed_(true) {}  // NOLINT
    [[nodiscard]] bool has_value() const noexcept { return !failed_; }
    explicit operator bool() const noexcept { return has_value(); }
    const Error& error() const {
        SEMEL_ASSERT(failed_, "error() of a Result that holds a value");
        return error_;
    }

  private:
    Error error_{};
    bool failed_ = false;
};

}  // namespace semel::base
