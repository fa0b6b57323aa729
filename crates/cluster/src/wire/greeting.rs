//! The greeting of a connection: both ends prove the cluster's secret, and introduce themselves.
//!
//! ```text
//! dialler                                                   listener
//!    opening: magic, protocol, trust, nonce           ──▶
//!                                                     ◀──   opening
//!    introduction: length, Hello, proof               ──▶
//!                                                     ◀──   1, introduction    (0: the proof is wrong)
//! ```
//!
//! A proof is an HMAC-SHA-256 of the end's label and of all bytes of the greeting before the proof.
//! The nonces make recorded greetings useless, and the labels reflected greetings. Without a secret
//! there are no proofs.
//!
//! The dialler proves first. A stranger who connects hence learns the version of the protocol, and
//! whether there is a secret. A listener decodes no byte of a peer that has not proved itself.

use downbeat_roles::{Hello, PROTOCOL};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::WireError;
use crate::secrets::Secrets;

/// The first bytes of a connection.
const MAGIC: [u8; 8] = *b"downbeat";
/// The bytes of an opening before those that depend on the version of the protocol.
const VERSIONED: usize = MAGIC.len() + 2;
/// The bytes of an opening: then one for the trust, and the nonce.
const OPENING: usize = VERSIONED + 1 + 32;
/// The place of the byte that says whether the end has a secret.
const TRUST: usize = VERSIONED;
/// The most bytes of a [`Hello`] with its names.
const LARGEST_HELLO: usize = 1024;
/// The bytes of a proof.
const PROOF: usize = 32;
/// The listener's answer to an introduction.
const REFUSED: u8 = 0;
const WELCOME: u8 = 1;

/// An end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The end that has opened the connection.
    Dialler,
    /// The end that has accepted it.
    Listener,
}

impl Side {
    /// Neither label is the beginning of the other.
    fn label(self) -> &'static [u8] {
        match self {
            Side::Dialler => b"downbeat cluster: dialler\0",
            Side::Listener => b"downbeat cluster: listener\0",
        }
    }
}

/// A greeting under way.
struct Greeting<'a, S> {
    stream: &'a mut S,
    /// All bytes so far of both ends, the dialler's opening first. The listener's answer of one
    /// byte is left out.
    transcript: Vec<u8>,
}

/// Greets a peer, and returns its introduction. Reads the bytes of the greeting, and no more.
///
/// # Errors
/// If the peer is no Downbeat process, speaks another version, or does not prove the secret.
pub async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    side: Side,
    me: &Hello,
    secrets: &Secrets,
) -> Result<Hello, WireError> {
    let mine = opening(secrets)?;
    let mut greeting = Greeting { stream, transcript: Vec::with_capacity(2 * (OPENING + LARGEST_HELLO)) };
    match side {
        Side::Dialler => {
            greeting.write(&mine).await?;
            let theirs = greeting.read_opening().await?;
            check_trust(theirs, secrets)?;
            let key = secrets.first();
            greeting.introduce(side, me, key, &[]).await?;
            match greeting.stream.read_u8().await? {
                WELCOME => {}
                REFUSED => return Err(WireError::OtherSecret),
                _ => return Err(WireError::Foreign),
            }
            Ok(greeting.read_introduction(Side::Listener, key.into_iter()).await?.0)
        }
        Side::Listener => {
            let theirs = greeting.read_opening().await;
            // A process of another version, or without the secret, must hear why it is refused.
            if matches!(theirs, Ok(_) | Err(WireError::Protocol(_))) {
                greeting.write(&mine).await?;
            }
            check_trust(theirs?, secrets)?;
            let introduced = greeting.read_introduction(Side::Dialler, secrets.all()).await;
            if matches!(introduced, Err(WireError::OtherSecret)) {
                greeting.stream.write_all(&[REFUSED]).await?;
            }
            let (peer, key) = introduced?;
            // The dialler knows the secret by which it has proved itself.
            greeting.introduce(side, me, key, &[WELCOME]).await?;
            Ok(peer)
        }
    }
}

/// The opening of an end with these secrets, with a fresh nonce.
fn opening(secrets: &Secrets) -> Result<[u8; OPENING], WireError> {
    let mut bytes = [0; OPENING];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()..VERSIONED].copy_from_slice(&PROTOCOL.to_le_bytes());
    bytes[TRUST] = secrets.first().is_some().into();
    let filled = SystemRandom::new().fill(&mut bytes[TRUST + 1..]);
    filled.map_err(|_| std::io::Error::other("the system gives no random numbers"))?;
    Ok(bytes)
}

/// Checks that both ends have a secret, or neither.
fn check_trust(opening: [u8; OPENING], secrets: &Secrets) -> Result<(), WireError> {
    match (opening[TRUST], secrets.first().is_some()) {
        (0, false) | (1, true) => Ok(()),
        (0, true) => Err(WireError::WithoutSecret),
        (1, false) => Err(WireError::NeedsSecret),
        _ => Err(WireError::Foreign),
    }
}

/// The proof of an end, which has sent or received these bytes.
fn proof(side: Side, transcript: &[u8], key: &hmac::Key) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    context.update(side.label());
    context.update(transcript);
    context.sign()
}

impl<S: AsyncRead + AsyncWrite + Unpin> Greeting<'_, S> {
    async fn write(&mut self, bytes: &[u8]) -> Result<(), WireError> {
        self.transcript.extend_from_slice(bytes);
        Ok(self.stream.write_all(bytes).await?)
    }

    /// Reads so many bytes more. Returns where they begin in the transcript.
    async fn read(&mut self, count: usize) -> Result<usize, WireError> {
        let begin = self.transcript.len();
        self.transcript.resize(begin + count, 0);
        self.stream.read_exact(&mut self.transcript[begin..]).await?;
        Ok(begin)
    }

    async fn read_opening(&mut self) -> Result<[u8; OPENING], WireError> {
        let mut bytes = [0; OPENING];
        let (versioned, rest) = bytes.split_at_mut(VERSIONED);
        self.stream.read_exact(versioned).await?;
        let [magic @ .., p0, p1] = &*versioned else { return Err(WireError::Foreign) };
        if *magic != MAGIC {
            return Err(WireError::Foreign);
        }
        let protocol = u16::from_le_bytes([*p0, *p1]);
        // The rest is encoded differently in another version.
        if protocol != PROTOCOL {
            return Err(WireError::Protocol(protocol));
        }
        self.stream.read_exact(rest).await?;
        self.transcript.extend_from_slice(&bytes);
        Ok(bytes)
    }

    /// Sends this end's introduction behind an answer.
    async fn introduce(
        &mut self,
        side: Side,
        me: &Hello,
        key: Option<&hmac::Key>,
        answer: &[u8],
    ) -> Result<(), WireError> {
        let body = postcard::to_allocvec(me).map_err(WireError::Garbled)?;
        let length = u16::try_from(body.len()).ok().filter(|_| body.len() <= LARGEST_HELLO);
        let too_large = || WireError::TooLarge { announced: body.len() as u64, most: LARGEST_HELLO as u64 };
        let begin = self.transcript.len();
        self.transcript.extend_from_slice(&length.ok_or_else(too_large)?.to_le_bytes());
        self.transcript.extend_from_slice(&body);
        if let Some(key) = key {
            let proof = proof(side, &self.transcript, key);
            self.transcript.extend_from_slice(proof.as_ref());
        }
        let bytes = [answer, &self.transcript[begin..]].concat();
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// Reads the introduction of the peer, which is at this end. Returns also the key of its proof.
    async fn read_introduction<'k>(
        &mut self,
        side: Side,
        keys: impl ExactSizeIterator<Item = &'k hmac::Key>,
    ) -> Result<(Hello, Option<&'k hmac::Key>), WireError> {
        let begin = self.read(2).await?;
        let length = match self.transcript[begin..] {
            [l0, l1] => usize::from(u16::from_le_bytes([l0, l1])),
            _ => return Err(WireError::Foreign),
        };
        if length > LARGEST_HELLO {
            return Err(WireError::TooLarge { announced: length as u64, most: LARGEST_HELLO as u64 });
        }
        let body = self.read(length).await?;
        let key = if keys.len() > 0 { Some(self.read_proof(side, keys).await?) } else { None };
        let hello: Hello = postcard::from_bytes(&self.transcript[body..body + length]).map_err(WireError::Garbled)?;
        // People read these texts in logs.
        let is_proper = |text: &str| text.chars().all(|c| !c.is_control());
        if is_proper(&hello.name) && is_proper(&hello.address) { Ok((hello, key)) } else { Err(WireError::Foreign) }
    }

    /// Reads the peer's proof, and returns the key that it was made with.
    async fn read_proof<'k>(
        &mut self,
        side: Side,
        mut keys: impl Iterator<Item = &'k hmac::Key>,
    ) -> Result<&'k hmac::Key, WireError> {
        let begin = self.read(PROOF).await?;
        let (proved, proof) = self.transcript.split_at(begin);
        let bytes = [side.label(), proved].concat();
        // The comparison takes the same time for each wrong proof.
        keys.find(|key| hmac::verify(key, &bytes, proof).is_ok()).ok_or(WireError::OtherSecret)
    }
}

#[cfg(test)]
mod tests;
