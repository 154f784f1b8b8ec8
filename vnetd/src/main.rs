//! The program vnetd.

use std::process::ExitCode;

fn main() -> ExitCode {
    vnetd::daemon::main()
}
