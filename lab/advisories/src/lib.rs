//! Whether a crate of `Cargo.lock` has a known vulnerability.
//!
//! `database.tar.gz` is a copy of RustSec's advisory database, of 21 August 2026. To take a newer one, clone the
//! database and run `git archive --format=tar HEAD crates rust | gzip -9n` there.

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustsec::{Database, Lockfile};

    const DATABASE: &[u8] = include_bytes!("../database.tar.gz");

    const LOCKFILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock");

    /// Advisories that do not matter here, each with the reason.
    const ACCEPTED: [(&str, &str); 0] = [];

    fn database() -> Database {
        let folder = tempfile::tempdir().unwrap();
        tar::Archive::new(flate2::read::GzDecoder::new(DATABASE)).unpack(folder.path()).unwrap();
        Database::open(folder.path()).unwrap()
    }

    #[test]
    fn no_crate_has_a_known_vulnerability() {
        let database = database();
        let lockfile = Lockfile::load(Path::new(LOCKFILE)).unwrap();
        let found = database.vulnerabilities(&lockfile);
        let is_accepted = |id: &str| ACCEPTED.iter().any(|(accepted, _)| *accepted == id);
        let open: Vec<String> = found
            .iter()
            .filter(|found| !is_accepted(found.advisory.id.as_str()))
            .map(|found| {
                format!(
                    "{} {}: {} {}",
                    found.package.name, found.package.version, found.advisory.id, found.advisory.title
                )
            })
            .collect();
        assert!(open.is_empty(), "take a newer version, or accept with a reason:\n{}", open.join("\n"));
        for (accepted, _) in ACCEPTED {
            assert!(found.iter().any(|found| found.advisory.id.as_str() == accepted), "{accepted} is no longer needed");
        }
    }

    #[test]
    fn a_vulnerable_crate_is_found() {
        let real = std::fs::read_to_string(LOCKFILE).unwrap();
        let source = real.lines().find(|line| line.starts_with("source = ")).unwrap();
        let lockfile = format!("version = 3\n\n[[package]]\nname = \"smallvec\"\nversion = \"1.6.0\"\n{source}\n");
        let found = database().vulnerabilities(&lockfile.parse().unwrap());
        assert!(found.iter().any(|found| found.advisory.id.as_str() == "RUSTSEC-2021-0003"), "{found:?}");
    }
}
