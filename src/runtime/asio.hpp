// The Asio types of this project: one concrete executor, awaitables on it, errors as values.
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace semel::runtime {

namespace asio = boost::asio;
using boost::system::error_code;

/// A concrete executor: the type-erased any_io_executor costs a virtual call per operation.
using Executor = asio::io_context::executor_type;

template <class T = void>
using Task = asio::awaitable<T, Executor>;

using UseAwaitable = asio::use_awaitable_t<Executor>;
/// Completion token: the awaited value is tuple(error_code, ...), nothing is thrown.
using AsTuple = asio::as_tuple_t<UseAwaitable>;
inline constexpr UseAwaitable use_awaitable{};
inline constexpr AsTuple as_tuple{};

}  // namespace semel::runtime
