#include "brokers/delivery.hpp"

#include <cstring>

namespace semel::brokers {

Delivery make_delivery(Receipt receipt, std::optional<std::string_view> key,
                       std::optional<std::string_view> value, std::span<const Header> headers) {
    std::size_t size = (key ? key->size() : 0) + (value ? value->size() : 0);
    for (const Header& header : headers)
        size += header.name.size() + (header.value ? header.value->size() : 0);
    Delivery out;
    out.bytes = std::make_unique_for_overwrite<char[]>(size);
    char* to = out.bytes.get();
    const auto copied = [&to](std::string_view from) {
        if (!from.empty()) std::memcpy(to, from.data(), from.size());
        const std::string_view view(to, from.size());
        to += from.size();
        return view;
    };
    if (key) out.key = copied(*key);
    if (value) out.value = copied(*value);
    out.headers.reserve(headers.size());
    for (const Header& header : headers) {
        Header& mine = out.headers.emplace_back();
        mine.name = copied(header.name);
        if (header.value) mine.value = copied(*header.value);
    }
    receipt.size = size + sizeof(Delivery) + headers.size() * sizeof(Header);
    out.receipt = std::move(receipt);
    return out;
}

}  // namespace semel::brokers
