//! The program `downbeat-lab`.

use std::process::ExitCode;

fn main() -> ExitCode {
    downbeat_lab::main()
}
