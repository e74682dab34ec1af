// The one file that compiles Asio's own code (see cmake/dependencies.cmake).
#include <boost/asio/impl/src.hpp>
#include <boost/asio/ssl/impl/src.hpp>
