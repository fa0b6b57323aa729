//! The download of one file: it goes on where an earlier one ended, and ends with a check.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, Write};
use std::path::PathBuf;
use std::time::Duration;

use downbeat_repository::is_onnx_name;
use futures_util::StreamExt;
use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};

use crate::body::Body;
use crate::cache::{Cache, read_into};
use crate::digest::{self, Digests, Expected};
use crate::failure::FetchError;
use crate::listing::RemoteFile;
use crate::manifest::CachedFile;
use crate::remote::Remote;

/// How often a download is taken up again without a byte more than before.
const MOST_ATTEMPTS: u32 = 4;

/// The pause before the first repetition; each later one is twice as long.
const PAUSE: Duration = Duration::from_millis(250);

/// Files from this size on have lines in the log while they come, bytes.
const LONG: u64 = 64 << 20;

/// A download under way.
struct Download<'a> {
    file: &'a RemoteFile,
    partial: PathBuf,
    to: File,
    digests: Digests,
    /// Bytes in the partial file.
    done: u64,
    bar: ProgressBar,
}

/// Why a download stops.
enum Stop {
    /// The connection ended; a later request may go on.
    Broken(String),
    /// Another request would not help.
    Failed(FetchError),
}

impl From<FetchError> for Stop {
    fn from(error: FetchError) -> Self {
        if error.is_passing() { Stop::Broken(error.to_string()) } else { Stop::Failed(error) }
    }
}

/// Downloads a file into the cache.
///
/// # Errors
/// If the file does not come, is not the announced one, or cannot be written. A part that came
/// stays for the next try.
pub(crate) async fn download(
    remote: &Remote,
    cache: &Cache,
    file: &RemoteFile,
    bars: &MultiProgress,
) -> Result<CachedFile, FetchError> {
    let download = Download::open(cache, file, bars)?;
    let (bar, begun) = (download.bar.clone(), download.done);
    let outcome = run(download, remote, cache).await;
    bar.finish_and_clear();
    match outcome {
        // The part that an earlier process left may have been wrong.
        Err(FetchError::Checksum(reason)) if begun > 0 => {
            tracing::warn!(file = %file.path, %reason, "downloading the whole file again");
            Box::pin(self::download(remote, cache, file, bars)).await
        }
        outcome => outcome,
    }
}

/// Runs a download to its end. A connection that breaks off is taken up again.
async fn run(mut download: Download<'_>, remote: &Remote, cache: &Cache) -> Result<CachedFile, FetchError> {
    let (file, begun, mut failures) = (download.file, download.done, 0);
    if begun > 0 {
        tracing::info!(file = %file.path, "the download goes on after {}", HumanBytes(begun));
    }
    loop {
        let before = download.done;
        match download.go_on(remote).await {
            Ok(()) => break,
            Err(Stop::Failed(error)) => return Err(error),
            Err(Stop::Broken(reason)) => {
                failures = if download.done > before { 1 } else { failures + 1 };
                if failures >= MOST_ATTEMPTS {
                    let came = HumanBytes(download.done);
                    return Err(FetchError::Unreachable(format!(
                        "{}: the download broke off after {came}: {reason}; the next start goes on from there",
                        file.path
                    )));
                }
                tracing::warn!(file = %file.path, %reason, "the download broke off; trying again");
                tokio::time::sleep(PAUSE * 2_u32.pow(failures)).await;
            }
        }
    }
    download.finish(cache)
}

impl<'a> Download<'a> {
    fn open(cache: &Cache, file: &'a RemoteFile, bars: &MultiProgress) -> Result<Self, FetchError> {
        let known = match &file.expected {
            Some(Expected::Sha256(text) | Expected::GitBlob(text)) => Some(text.as_str()),
            None => file.tag.as_deref(),
        };
        let name = digest::of_text(&format!("{} {}", file.locator, known.unwrap_or_default()));
        let partial = cache.partial().join(&name[..24]);
        let opened = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&partial);
        let mut to = opened.map_err(FetchError::cache(&partial))?;
        let mut digests = Digests::new(file.expected.as_ref(), file.size);
        let mut done = 0;
        let length = to.metadata().map_err(FetchError::cache(&partial))?.len();
        // Without a validator nobody knows whether the file is still the same.
        if known.is_some() && file.size.is_none_or(|size| length <= size) {
            done = read_into(&mut to, &mut digests).map_err(FetchError::cache(&partial))?;
        } else {
            to.set_len(0).map_err(FetchError::cache(&partial))?;
        }
        let template = "{prefix:>16} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let short = file.path.rsplit('/').next().unwrap_or_default().chars().take(16).collect::<String>();
        let bar = ProgressBar::new(file.size.unwrap_or(0)).with_style(style.progress_chars("=> ")).with_prefix(short);
        let bar = bars.add(bar);
        bar.set_position(done);
        Ok(Download { file, partial, to, digests, done, bar })
    }

    /// Requests the rest of the file, and writes it.
    async fn go_on(&mut self, remote: &Remote) -> Result<(), Stop> {
        if self.file.size.is_some_and(|size| size == self.done) {
            return self.restart_if_empty();
        }
        let Body { from, size, mut bytes } = remote.read(self.file, self.done).await?;
        if let (Some(wanted), Some(found)) = (self.file.size, size)
            && wanted != found
        {
            return Err(Stop::Failed(FetchError::Changed(self.file.path.clone())));
        }
        if from != self.done {
            self.restart()?;
        }
        let most = self.file.size.or(size);
        let mut told = self.done;
        while let Some(chunk) = bytes.next().await {
            let chunk = chunk.map_err(Stop::Broken)?;
            let done = self.done + chunk.len() as u64;
            if most.is_some_and(|most| done > most) {
                let message = format!("{}: the server sends more bytes than it announced", self.file.path);
                return Err(Stop::Failed(FetchError::Checksum(message)));
            }
            self.write(&chunk)?;
            self.done = done;
            self.bar.set_position(done);
            if let Some(most) = most
                && most >= LONG
                && done - told >= most / 10
            {
                told = done;
                self.tell(done, most);
            }
        }
        match most {
            Some(most) if self.done < most => Err(Stop::Broken(format!("{} of {most} bytes came", self.done))),
            _ => Ok(()),
        }
    }

    /// A line of the log, where no terminal shows the bar.
    fn tell(&self, done: u64, most: u64) {
        if self.bar.is_hidden() {
            let percent = done.saturating_mul(100) / most.max(1);
            tracing::info!(file = %self.file.path, "downloaded {} of {} ({percent}%)", HumanBytes(done), HumanBytes(most));
        }
    }

    fn restart_if_empty(&mut self) -> Result<(), Stop> {
        if self.done == 0 { self.restart() } else { Ok(()) }
    }

    /// Begins again: the server could not go on.
    fn restart(&mut self) -> Result<(), Stop> {
        self.digests = Digests::new(self.file.expected.as_ref(), self.file.size);
        self.done = 0;
        self.to.set_len(0).and_then(|()| self.to.rewind()).map_err(FetchError::cache(&self.partial))?;
        Ok(())
    }

    fn write(&mut self, chunk: &[u8]) -> Result<(), Stop> {
        if let Err(error) = self.to.write_all(chunk) {
            // A full disk helps nobody: the space goes back.
            let _ = fs::remove_file(&self.partial);
            return Err(Stop::Failed(FetchError::cache(&self.partial)(error)));
        }
        self.digests.update(chunk);
        Ok(())
    }

    /// Checks the whole file, and takes it into the cache.
    fn finish(self, cache: &Cache) -> Result<CachedFile, FetchError> {
        let sha256 = self.digests.finish().map_err(|(wanted, found)| {
            // The next try begins anew.
            let _ = fs::remove_file(&self.partial);
            FetchError::Checksum(format!(
                "{}: the checksum is {found}, but the server announced {wanted}; the file was not kept. Try again: if \
                 the message stays, the file is wrong on the server",
                self.file.path
            ))
        })?;
        if let Some(why) = page_or_pointer(&self.partial, &self.file.path) {
            let _ = fs::remove_file(&self.partial);
            return Err(FetchError::Checksum(format!("{}: {why}", self.file.path)));
        }
        let (size, modified) = cache.keep(&self.partial, &sha256)?;
        let RemoteFile { path, locator, tag, .. } = self.file.clone();
        Ok(CachedFile { path, locator, tag, sha256, size, modified })
    }
}

/// Why a file that should be a model is something that servers send in its place.
fn page_or_pointer(file: &std::path::Path, path: &str) -> Option<&'static str> {
    use std::io::Read;
    if !is_onnx_name(path) {
        return None;
    }
    let mut start = [0; 32];
    let read = File::open(file).and_then(|mut file| file.read(&mut start)).unwrap_or(0);
    let start = &start[..read];
    if start.is_empty() {
        Some("the file is empty")
    } else if start.trim_ascii_start().starts_with(b"<") {
        Some("the server sent a web page, and no ONNX file; check the address, and whether it asks for a login")
    } else if start.starts_with(b"version https://git-lfs") {
        Some("the server sent a git-lfs pointer, and no ONNX file; give the address of the file itself")
    } else {
        None
    }
}
