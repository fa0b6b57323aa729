//! Gives the program the version of its compiler, as counts depend on the compiler.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    println!("cargo:rustc-env=DOWNBEAT_GATE_RUSTC={}", String::from_utf8_lossy(&version).trim());
}
