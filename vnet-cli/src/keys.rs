//! `vnet keys`: a small private certificate authority, for sites without one. It needs no vnetd.
//!
//! One directory contains all files: `ca.pem` and `ca.key`, the authority; `NAME.pem` and `NAME.key`, a host's latest certificate
//! and its key; `crl.pem`, the revocation list; `issued/SERIAL.pem`, every certificate ever issued. A host needs `ca.pem`,
//! `crl.pem` and its own two files; `ca.key` never leaves the authority's directory.
//!
//! Files are written under a temporary name and renamed, so that readers never see a partial file. Keys are created with mode
//! 600, so other users can never read them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType,
    SerialNumber,
};
use serde_json::{Value, json};
use time::{Duration, OffsetDateTime};
use vnet::link::sealed::identity::{CertificateInfo, Revoked, revoked, server_name, unix_now};
use vnet::wire::ethernet::Mac;

/// Default of `--dir`.
const FOLDER: &str = "/etc/vnet/keys";
/// File modes of private keys and of all other files.
const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;
/// How long before its issue a certificate becomes valid, because hosts' clocks differ.
const BACKDATED: Duration = Duration::hours(1);
const CA_DAYS: u32 = 3650;
const HOST_DAYS: u32 = 397;

/// `vnet keys` subcommands.
#[derive(Subcommand)]
pub enum KeysCommand {
    /// Create a new authority
    Init {
        #[command(flatten)]
        folder: Folder,
        /// Lifetime of the authority's certificate in days
        #[arg(long, default_value_t = CA_DAYS, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
    },
    /// Issue a certificate to a host, or renew it: the files of that name are replaced
    Issue(Issue),
    /// Show the authority and all certificates it has issued, or those in files
    Show {
        #[command(flatten)]
        folder: Folder,
        /// Certificates to show instead
        files: Vec<PathBuf>,
    },
    /// Revoke all certificates of a host; copy the new crl.pem to the other hosts
    Revoke {
        #[command(flatten)]
        folder: Folder,
        /// Name of the host
        name: String,
    },
}

/// Selects the authority.
#[derive(Args)]
pub struct Folder {
    /// Directory of the authority
    #[arg(long, value_name = "DIR", default_value = FOLDER)]
    dir: PathBuf,
}

/// Host and contents of a certificate.
#[derive(Args)]
pub struct Issue {
    #[command(flatten)]
    folder: Folder,
    /// Name of the host, as in its [host] name
    name: String,
    /// Lifetime in days
    #[arg(long, default_value_t = HOST_DAYS, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Networks that the host is authorized for, as in 1,2 [default: all]
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..1 << 24))]
    networks: Vec<u32>,
    /// Source addresses that the host's frames may have [default: all]
    #[arg(long, value_name = "MACS", value_delimiter = ',')]
    macs: Vec<Mac>,
}

/// Output as text and as JSON.
type Answer = (String, Value);

/// Runs a subcommand. The error is one line.
pub fn run(command: &KeysCommand) -> Result<Answer, String> {
    match command {
        KeysCommand::Init { folder, days } => init(&folder.dir, *days),
        KeysCommand::Issue(issue) => Authority::open(&issue.folder.dir)?.issue(issue),
        KeysCommand::Show { folder, files } if files.is_empty() => show(&folder.dir),
        KeysCommand::Show { files, .. } => show_files(files),
        KeysCommand::Revoke { folder, name } => Authority::open(&folder.dir)?.revoke(name),
    }
}

fn init(folder: &Path, days: u32) -> Result<Answer, String> {
    let [certificate, key] = ["ca.pem", "ca.key"].map(|file| folder.join(file));
    if let Some(there) = [&certificate, &key].into_iter().find(|file| file.exists()) {
        let there = there.display();
        return Err(format!("'{there}' already exists, and hosts may rely on it; choose another --dir"));
    }
    fs::create_dir_all(folder.join("issued"))
        .map_err(|error| format!("cannot create '{}': {error}; choose another --dir", folder.display()))?;
    let mut params = validity(days);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    // Certificate verification identifies authorities by name, so each authority needs a unique name.
    let pair = KeyPair::generate().map_err(failed)?;
    let suffix = vnet::link::sealed::identity::hex(&pair.public_key_raw()[1..5]);
    params.distinguished_name = common_name(&format!("vnet authority {suffix}"));
    let made = params.self_signed(&pair).map_err(failed)?;
    write(&key, SECRET, &pair.serialize_pem())?;
    write(&certificate, PUBLIC, &made.pem())?;
    Authority::open(folder)?.publish(&[])?;
    let text = format!(
        "authority created in {}\nnext: 'vnet keys issue HOST' for each host; keep {} here and secret\n",
        folder.display(),
        key.display()
    );
    Ok((text, json!({ "ca": certificate, "key": key, "crl": folder.join("crl.pem") })))
}

/// An authority with its private key.
struct Authority {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn open(folder: &Path) -> Result<Authority, String> {
        let read = |file: &str| {
            let path = folder.join(file);
            fs::read_to_string(&path).map_err(|error| {
                format!(
                    "cannot read '{}': {error}; create an authority with 'vnet keys init'",
                    path.display()
                )
            })
        };
        let wrong = |file: &str, error: rcgen::Error| format!("'{}': {error}", folder.join(file).display());
        let key = KeyPair::from_pem(&read("ca.key")?).map_err(|error| wrong("ca.key", error))?;
        let issuer =
            Issuer::from_ca_cert_pem(&read("ca.pem")?, key).map_err(|error| wrong("ca.pem", error))?;
        Ok(Authority { folder: folder.into(), issuer })
    }

    fn issue(&self, issue: &Issue) -> Result<Answer, String> {
        let Issue { name, days, networks, macs, .. } = issue;
        server_name(name)?;
        if name == "ca" || name == "crl" || name.contains('/') {
            return Err(format!(
                "'{name}' cannot be a host name: its files would clash with the authority's"
            ));
        }
        let mut params = validity(*days);
        params.distinguished_name = common_name(name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let text = |text: String| text.as_str().try_into().map_err(failed);
        params.subject_alt_names.push(SanType::DnsName(text(name.clone())?));
        let networks = networks.iter().map(|id| format!("vnet:network={id}"));
        for claim in networks.chain(macs.iter().map(|mac| format!("vnet:mac={mac}"))) {
            params.subject_alt_names.push(SanType::URI(text(claim)?));
        }
        let pair = KeyPair::generate().map_err(failed)?;
        let made = params.signed_by(&pair, &self.issuer).map_err(failed)?;
        let info = CertificateInfo::read(made.der())?;
        let [certificate, key] = ["pem", "key"].map(|kind| self.folder.join(format!("{name}.{kind}")));
        fs::create_dir_all(self.folder.join("issued"))
            .map_err(|error| format!("cannot create 'issued': {error}"))?;
        // Record the certificate first: only recorded certificates can be revoked.
        write(&self.folder.join("issued").join(format!("{}.pem", info.serial)), PUBLIC, &made.pem())?;
        write(&key, SECRET, &pair.serialize_pem())?;
        write(&certificate, PUBLIC, &made.pem())?;
        // The configuration accepts only absolute paths. This fails only if there is no current directory.
        let folder = std::path::absolute(&self.folder).unwrap_or_else(|_| self.folder.clone());
        let at = folder.display();
        let text = format!(
            "certificate {} issued to {name}, valid for {days} days\ncopy these files to the host and add to its configuration:\n\n\
             [identity]\nca = \"{at}/ca.pem\"\ncertificate = \"{at}/{name}.pem\"\nkey = \"{at}/{name}.key\"\ncrl = \"{at}/crl.pem\"\n",
            info.serial
        );
        Ok((text, json!({ "certificate": certificate, "key": key, "serial": info.serial })))
    }

    fn revoke(&self, name: &str) -> Result<Answer, String> {
        let mut list = revoked(&self.folder.join("crl.pem")).map_err(|error| error.to_string())?;
        let known = |serial: &str, list: &[Revoked]| list.iter().any(|entry| entry.serial_hex() == serial);
        let mut serials = vec![];
        for info in issued(&self.folder)? {
            if info.names.iter().any(|other| other.eq_ignore_ascii_case(name)) && !known(&info.serial, &list)
            {
                list.push(Revoked { serial: info.serial_bytes(), at: unix_now() });
                serials.push(info.serial);
            }
        }
        if serials.is_empty() {
            return Err(format!("'{name}' has no certificate to revoke; see 'vnet keys show'"));
        }
        self.publish(&list)?;
        let crl = self.folder.join("crl.pem");
        let text = format!(
            "revoked {} of {name}: {}\ncopy {} to the other hosts; they reload it within a second\n",
            if serials.len() == 1 { "the certificate" } else { "the certificates" },
            serials.join(", "),
            crl.display()
        );
        Ok((text, json!({ "revoked": serials, "crl": crl })))
    }

    /// Writes the revocation list.
    fn publish(&self, list: &[Revoked]) -> Result<(), String> {
        let now = OffsetDateTime::now_utc();
        let entry = |entry: &Revoked| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&entry.serial),
            revocation_time: OffsetDateTime::from_unix_timestamp(entry.at).unwrap_or(now),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: now - BACKDATED,
            next_update: now + Duration::days(CA_DAYS.into()),
            crl_number: SerialNumber::from(now.unix_timestamp().unsigned_abs()),
            issuing_distribution_point: None,
            revoked_certs: list.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let made = params.signed_by(&self.issuer).and_then(|list| list.pem()).map_err(failed)?;
        write(&self.folder.join("crl.pem"), PUBLIC, &made)
    }
}

/// All issued certificates, sorted by expiry.
fn issued(folder: &Path) -> Result<Vec<CertificateInfo>, String> {
    let folder = folder.join("issued");
    let entries = fs::read_dir(&folder).map_err(|error| {
        format!("cannot read '{}': {error}; create an authority with 'vnet keys init'", folder.display())
    })?;
    let mut found = vec![];
    for entry in entries {
        let path = entry.map_err(|error| format!("cannot read '{}': {error}", folder.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "pem") {
            found.push(CertificateInfo::load(&path).map_err(|error| error.to_string())?);
        }
    }
    found.sort_by_key(|info| info.valid.1);
    Ok(found)
}

fn show(folder: &Path) -> Result<Answer, String> {
    let load = |path: PathBuf| CertificateInfo::load(&path).map_err(|error| error.to_string());
    let ca = load(folder.join("ca.pem"))?;
    let list = revoked(&folder.join("crl.pem")).map_err(|error| error.to_string())?;
    let rows: Vec<_> = issued(folder)?
        .into_iter()
        .map(|info| {
            let state = if list.iter().any(|entry| entry.serial_hex() == info.serial) {
                "revoked"
            } else {
                state(&info)
            };
            (info, state)
        })
        .collect();
    let mut text =
        format!("authority {}, ends {}, SHA-256 {}\n", folder.display(), date(ca.valid.1), ca.fingerprint);
    text += &table(&rows);
    let certificates: Vec<_> = rows.iter().map(|(info, state)| as_json(info, state)).collect();
    Ok((text, json!({ "ca": as_json(&ca, state(&ca)), "certificates": certificates })))
}

fn show_files(files: &[PathBuf]) -> Result<Answer, String> {
    let load = |path: &PathBuf| CertificateInfo::load(path).map_err(|error| error.to_string());
    let infos: Vec<CertificateInfo> = files.iter().map(load).collect::<Result<_, _>>()?;
    let rows: Vec<_> = infos
        .into_iter()
        .map(|info| {
            let state = state(&info);
            (info, state)
        })
        .collect();
    let certificates: Vec<_> = rows.iter().map(|(info, state)| as_json(info, state)).collect();
    Ok((table(&rows), json!({ "certificates": certificates })))
}

fn state(info: &CertificateInfo) -> &'static str {
    let now = unix_now();
    if now < info.valid.0 {
        "not yet valid"
    } else if now > info.valid.1 {
        "expired"
    } else {
        "valid"
    }
}

fn table(rows: &[(CertificateInfo, &str)]) -> String {
    let mut text = format!("{:16}  {:13}  {:10}  {:40}  AUTHORIZED FOR\n", "NAME", "STATE", "ENDS", "SERIAL");
    for (info, state) in rows {
        let limits =
            |what: &str, list: Option<Vec<String>>| list.map(|list| format!("{what} {}", list.join(" ")));
        let claims = info.claims.clone();
        let networks =
            limits("networks", claims.networks.map(|ids| ids.iter().map(ToString::to_string).collect()));
        let macs =
            limits("addresses", claims.macs.map(|macs| macs.iter().map(ToString::to_string).collect()));
        let limits: Vec<_> = networks.into_iter().chain(macs).collect();
        let limits = if limits.is_empty() { "everything".into() } else { limits.join(", ") };
        let (name, ends) = (info.names.join(" "), date(info.valid.1));
        text += &format!("{name:16}  {state:13}  {ends:10}  {:40}  {limits}\n", info.serial);
    }
    text
}

fn as_json(info: &CertificateInfo, state: &str) -> Value {
    json!({
        "names": info.names,
        "state": state,
        "not_before": info.valid.0,
        "not_after": info.valid.1,
        "serial": info.serial,
        "sha256": info.fingerprint,
        "networks": info.claims.networks,
        "macs": info.claims.macs,
    })
}

/// The UTC date in ISO 8601.
fn date(unix_s: i64) -> String {
    OffsetDateTime::from_unix_timestamp(unix_s).map_or("-".into(), |time| time.date().to_string())
}

fn validity(days: u32) -> CertificateParams {
    let now = OffsetDateTime::now_utc();
    let mut params = CertificateParams::default();
    params.not_before = now - BACKDATED;
    params.not_after = now + Duration::days(days.into());
    params
}

fn common_name(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

fn failed(error: rcgen::Error) -> String {
    format!("cannot create the certificate: {error}")
}

/// Writes a file atomically; it has this mode from its creation.
fn write(path: &Path, mode: u32, text: &str) -> Result<(), String> {
    let scratch = path.with_extension(format!("{}.new", std::process::id()));
    let put = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&scratch)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&scratch, path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    };
    put().map_err(|error| {
        let _ = fs::remove_file(&scratch);
        format!("cannot write '{}': {error}", path.display())
    })
}
