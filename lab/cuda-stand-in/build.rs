//! Gives the library the driver's name: after a load by its path, `dlopen("libcuda.so.1")` finds
//! the same library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
