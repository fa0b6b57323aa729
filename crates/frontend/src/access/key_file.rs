//! The file of API keys: hashes, and the rights of each key.
//!
//! ```toml
//! [keys.web]
//! hash = "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
//! scopes = ["infer"]
//! models = ["resnet50", "bert-*"]
//! requests_per_second = 100
//! ```
//!
//! A key is 256 random bits behind its name, so that no one guesses it from its hash.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, bail};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use downbeat_service::budget::ByteBudget;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use super::need::Scope;
use super::rate::Rate;
use crate::reloaded::read_bounded;

/// Largest file of keys, bytes.
const MAX_FILE: u64 = 4 << 20;
/// Most characters of a key's name.
const MAX_NAME: usize = 64;
/// Random bytes of a key.
const SECRET_BYTES: usize = 32;
const ALGORITHM: &str = "sha256:";

type Hash = [u8; SHA256_OUTPUT_LEN];

/// The keys of a file, by name.
pub(super) struct Keys(BTreeMap<String, Arc<Key>>);

/// A key, and its rights.
#[derive(Debug)]
pub(super) struct Key {
    pub name: String,
    hash: Hash,
    scopes: Vec<Scope>,
    /// Names, and beginnings of names before a `*`; `None`: all models.
    models: Option<Vec<String>>,
    pub rate: Option<Rate>,
    /// Most bytes that the key's requests may hold together; `None`: the limit of all requests.
    bytes_in_flight: Option<u64>,
    budget: OnceLock<Arc<ByteBudget>>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    keys: BTreeMap<String, Entry>,
}

/// A missing limit is left out: TOML has no form for `None`, and its writer leaves such fields out.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    hash: String,
    scopes: Vec<Scope>,
    models: Option<Vec<String>>,
    requests_per_second: Option<f64>,
    bytes_in_flight: Option<u64>,
}

impl Keys {
    /// Reads a file of keys.
    pub fn read(file: &Path) -> anyhow::Result<Keys> {
        let shown = file.display();
        let text = String::from_utf8(read_bounded(file, MAX_FILE)?).with_context(|| format!("{shown} is not UTF-8"))?;
        let keys = Keys::parse(&text).with_context(|| format!("{shown} is no file of API keys"))?;
        if keys.0.is_empty() {
            tracing::warn!(file = %shown, "the file has no API key, so no request is answered; downbeat key add makes one");
        }
        Ok(keys)
    }

    fn parse(text: &str) -> anyhow::Result<Keys> {
        let file: File = toml::from_str(text)?;
        let key = |(name, entry): (String, Entry)| {
            let key = Key::of(&name, entry).with_context(|| format!("key '{name}'"))?;
            Ok((name, Arc::new(key)))
        };
        Ok(Keys(file.keys.into_iter().map(key).collect::<anyhow::Result<_>>()?))
    }

    /// The key that a request presents. The name is no secret; the comparison of the hash takes as
    /// long for every key.
    pub fn find(&self, presented: &[u8]) -> Option<Arc<Key>> {
        let name = presented.split(|byte| *byte == b'.').next()?;
        let key = self.0.get(std::str::from_utf8(name).ok()?)?;
        bool::from(hash_of(presented).ct_eq(&key.hash)).then(|| Arc::clone(key))
    }
}

impl Key {
    fn of(name: &str, entry: Entry) -> anyhow::Result<Key> {
        check_name(name)?;
        if entry.scopes.is_empty() {
            bail!("scopes is empty; expected infer, read or manage");
        }
        if let Some(rate) = entry.requests_per_second
            && !(rate.is_finite() && rate > 0.0)
        {
            bail!("requests_per_second is {rate}; expected a number above 0");
        }
        Ok(Key {
            name: name.to_owned(),
            hash: parse_hash(&entry.hash)?,
            scopes: entry.scopes,
            models: entry.models,
            rate: entry.requests_per_second.map(Rate::new),
            bytes_in_flight: entry.bytes_in_flight,
            budget: OnceLock::new(),
        })
    }

    /// The budget of the key's requests, a part of that of all; `None`: the key has no limit.
    pub fn budget(&self, of_all: &Arc<ByteBudget>) -> Option<&Arc<ByteBudget>> {
        let limit = self.bytes_in_flight?;
        Some(self.budget.get_or_init(|| of_all.part(limit)))
    }

    /// Whether the key has a scope.
    pub fn has(&self, scope: Scope) -> bool {
        scope == Scope::Open || self.scopes.contains(&scope)
    }

    /// Whether the key is for all models.
    pub fn is_for_all(&self) -> bool {
        self.models.is_none()
    }

    /// Whether the key is for a model.
    pub fn may_use(&self, model: &str) -> bool {
        let is_of = |pattern: &String| match pattern.strip_suffix('*') {
            Some(beginning) => model.starts_with(beginning),
            None => model == pattern,
        };
        self.models.as_ref().is_none_or(|models| models.iter().any(is_of))
    }
}

fn check_name(name: &str) -> anyhow::Result<()> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_name) {
        bail!("the name of a key has 1 to {MAX_NAME} letters, digits, - and _");
    }
    Ok(())
}

fn hash_of(key: &[u8]) -> Hash {
    let mut hash = Hash::default();
    hash.copy_from_slice(digest(&SHA256, key).as_ref());
    hash
}

fn parse_hash(text: &str) -> anyhow::Result<Hash> {
    let wrong = || format!("the hash is not {ALGORITHM} and 64 hexadecimal digits");
    let digits =
        text.strip_prefix(ALGORITHM).filter(|digits| digits.len() == 2 * SHA256_OUTPUT_LEN && digits.is_ascii());
    let digits = digits.with_context(wrong)?;
    let mut hash = Hash::default();
    for (byte, at) in hash.iter_mut().zip((0..).step_by(2)) {
        let pair = digits.get(at..at + 2).with_context(wrong)?;
        *byte = u8::from_str_radix(pair, 16).ok().filter(|_| !pair.starts_with('+')).with_context(wrong)?;
    }
    Ok(hash)
}

/// A key to be made.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// The name of the key.
    pub name: String,
    /// The scopes of the key, at least one.
    pub scopes: Vec<Scope>,
    /// The models that the key is for; empty: all models.
    pub models: Vec<String>,
    /// Most requests a second; `None`: no limit.
    pub requests_per_second: Option<f64>,
    /// Most bytes in flight; `None`: no limit of its own.
    pub bytes_in_flight: Option<u64>,
}

/// Makes a key, adds its hash to a file, and returns the key. A file that does not exist is made, for
/// its owner alone.
///
/// # Errors
/// If the file is wrong or cannot be written, the name is taken or none, or a limit is none.
pub fn add_key(file: &Path, new: &NewKey) -> anyhow::Result<String> {
    let shown = file.display();
    let text = match fs::exists(file).with_context(|| format!("cannot read {shown}"))? {
        true => String::from_utf8(read_bounded(file, MAX_FILE)?).with_context(|| format!("{shown} is not UTF-8"))?,
        false => String::new(),
    };
    let present = Keys::parse(&text).with_context(|| format!("{shown} is no file of API keys"))?;
    if present.0.contains_key(&new.name) {
        bail!("{shown} has a key '{}' already; choose another name, or remove that key first", new.name);
    }
    let mut secret = [0; SECRET_BYTES];
    SystemRandom::new().fill(&mut secret).ok().context("the system gives no random numbers")?;
    let key = format!("{}.{}", new.name, BASE64_URL_SAFE_NO_PAD.encode(secret));
    let part = part_of(new, &hash_of(key.as_bytes()))?;
    // The file must stay one that the server reads.
    Keys::parse(&part)?;
    let separator = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    let gap = if text.is_empty() { "" } else { "\n" };
    let mut opened = fs::OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(file)
        .with_context(|| format!("cannot write {shown}"))?;
    opened.write_all(format!("{separator}{gap}{part}").as_bytes()).with_context(|| format!("cannot write {shown}"))?;
    Ok(key)
}

/// The part of a file with a key.
fn part_of(new: &NewKey, hash: &Hash) -> anyhow::Result<String> {
    let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    let entry = Entry {
        hash: format!("{ALGORITHM}{digits}"),
        scopes: new.scopes.clone(),
        models: Some(new.models.clone()).filter(|models| !models.is_empty()),
        requests_per_second: new.requests_per_second,
        bytes_in_flight: new.bytes_in_flight,
    };
    Ok(toml::to_string(&File { keys: [(new.name.clone(), entry)].into() })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(name: &str) -> NewKey {
        let (models, name) = (Vec::new(), name.to_owned());
        NewKey { name, scopes: vec![Scope::Infer], models, requests_per_second: None, bytes_in_flight: None }
    }

    fn error(text: &str) -> String {
        format!("{:#}", Keys::parse(text).err().unwrap())
    }

    #[test]
    fn added_keys_are_found_and_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.toml");
        let web = add_key(&file, &new("web")).unwrap();
        let limited =
            NewKey { models: vec!["a\"b".into(), "bert-*".into()], requests_per_second: Some(2.0), ..new("app") };
        let app = add_key(&file, &limited).unwrap();
        let keys = Keys::read(&file).unwrap();
        let found = keys.find(web.as_bytes()).unwrap();
        assert_eq!((found.name.as_str(), found.has(Scope::Infer), found.has(Scope::Manage)), ("web", true, false));
        assert!(found.may_use("anything"));
        let found = keys.find(app.as_bytes()).unwrap();
        assert!(found.may_use("a\"b") && found.may_use("bert-large") && !found.may_use("bert") && found.rate.is_some());
        let swapped = format!("app.{}", web.split_once('.').unwrap().1);
        for wrong in [swapped.as_str(), "web", "web.", "", ".", &format!("{web}x"), &web[..web.len() - 1], "none.x"] {
            assert!(keys.find(wrong.as_bytes()).is_none(), "{wrong}");
        }
        assert!(keys.find(&[0xff, b'.', 1]).is_none());
        assert!(!fs::read_to_string(&file).unwrap().contains(web.split_once('.').unwrap().1), "only hashes are kept");
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        assert!(add_key(&file, &new("web")).unwrap_err().to_string().contains("already"));
    }

    #[test]
    fn a_file_that_was_written_by_hand_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.toml");
        fs::write(&file, "# mine").unwrap();
        add_key(&file, &new("web")).unwrap();
        assert!(fs::read_to_string(&file).unwrap().starts_with("# mine\n\n[keys.web]\n"));
        fs::write(&file, "nonsense").unwrap();
        assert!(add_key(&file, &new("web")).is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "nonsense");
    }

    #[test]
    fn wrong_entries_are_errors_that_name_the_key() {
        let hash = format!("hash = \"sha256:{}\"", "0".repeat(64));
        assert!(error(&format!("[keys.a]\n{hash}\nscopes = []")).contains("key 'a': scopes is empty"));
        assert!(error(&format!("[keys.a]\n{hash}\nscopes = ['all']")).contains("infer"));
        assert!(error(&format!("[keys.a]\n{hash}\nscopes = ['open']")).contains("open"));
        assert!(error(&format!("[keys.a]\n{hash}\nscopes = ['read']\nmodel = 'x'")).contains("model"));
        assert!(error("[keys.a]\nhash = 'secret'\nscopes = ['read']").contains("64 hexadecimal digits"));
        assert!(error(&format!("[keys.a]\nhash = 'sha256:{}'\nscopes = ['read']", "+0".repeat(32))).contains("64"));
        assert!(error(&format!("[keys.'a b']\n{hash}\nscopes = ['read']")).contains("letters"));
        let rate = format!("[keys.a]\n{hash}\nscopes = ['read']\nrequests_per_second = ");
        assert!(error(&format!("{rate}0.0")).contains("above 0") && error(&format!("{rate}nan")).contains("above 0"));
    }
}
