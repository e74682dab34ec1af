// The program.
#include "cli/cli.hpp"
#include "leaves/leaves.hpp"
#include "mock/mock.hpp"

int main(int argc, char** argv) {
    semel::cli::Leaves leaves = semel::leaves();
    leaves.mock_upstream = semel::mock::run;
    leaves.mock_upstream_help = semel::mock::help();
    return semel::cli::run(argc, argv, leaves);
}
