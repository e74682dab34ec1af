// AnswersSingly: what a store offers beside core::Store if one item of a batch may have to wait for long while the others need
// not: a row that a transaction of somebody else holds.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "core/store.hpp"

namespace semel::core {

using ItemDone = std::function<void(std::size_t index, base::Result<Decided> result)>;

/// A mix-in: who holds a Store asks for it by dynamic_cast.
class AnswersSingly {
  public:
    virtual ~AnswersSingly() = default;

    /// As Store::submit, but `done` is called once for each item, as soon as that is answered, on any thread; several calls may
    /// run at the same time.
    virtual void submit_singly(std::vector<Item> items, ItemDone done) = 0;
};

}  // namespace semel::core
