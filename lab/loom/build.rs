//! Sets `cfg(loom)` for this crate alone, so that it is built beside all others, with their
//! dependencies.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cfg=loom");
}
